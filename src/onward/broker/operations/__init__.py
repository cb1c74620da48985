"""Operations: `dispatch` takes a request to its handler; one module of handlers per noun."""
