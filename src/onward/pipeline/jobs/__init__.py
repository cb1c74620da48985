"""Ready jobs, each one readable file; `onward pipeline NAME` runs them."""
