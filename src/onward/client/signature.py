"""How a function wants to be called, read from its parameters once.

    Message, Delivery                       the delivery itself
    bytes, or no annotation                 the body as it is
    str                                     the body as text
    dict, list, Any, object                 the body as the JSON value that it is
    a pydantic model                        validated by pydantic, if that is installed
    dataclass, msgspec.Struct, TypedDict... the body as JSON, converted and checked by msgspec

The first parameter that is not the delivery is the body. A batch function takes a list of these:
`list[Order]`, `list[Delivery]`. What cannot be called like this is refused when it is decorated; a
body that does not convert raises `Unconvertible`: it would not convert the next time either.
"""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from onward.errors import InvalidRequest
from onward.message.message import Message

Convert = Callable[[bytes], object]

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_LISTS = (list, Sequence, typing.Iterable)


class Unconvertible(ValueError):
    """A body is not what the function's annotation says."""


class Signature:
    """The parameters of one function: which get the delivery, which one the body.

    >>> def charge(order: dict[str, int], message: Message) -> None: ...
    >>> signature = Signature(charge)
    >>> signature.arguments(Message("orders", 7, b'{"id": 1}'))
    ([{'id': 1}, Message(topic='orders', offset=7, ...)], {})
    """

    def __init__(self, function: Callable[..., object], *, is_batch: bool = False) -> None:
        self.name = name_of(function)
        self._is_batch = is_batch
        self._convert: Convert | None = None
        self._positional: list[bool] = []
        """For each positional parameter: whether it gets the delivery, not the body."""
        self._named: dict[str, bool] = {}
        for parameter in _parameters(function, self.name):
            self._add(parameter)

    def arguments(self, delivery: Message) -> tuple[list[object], dict[str, object]]:
        """Return what to call the function with; raises `Unconvertible`."""
        body = None if self._convert is None else self.convert(delivery)
        return self._bound(delivery, body)

    @property
    def is_body_alone(self) -> bool:
        """Tell whether the function takes the body and nothing else, as its first argument."""
        return self._positional == [False] and not self._named

    def batch_arguments(
        self, deliveries: Sequence[Message], bodies: list[object]
    ) -> tuple[list[object], dict[str, object]]:
        """Return what to call a batch function with: `bodies` are what `convert` returned."""
        return self._bound(deliveries, bodies)

    def convert(self, delivery: Message) -> object:
        """Return a body as the annotation wants it; raises `Unconvertible`."""
        if self._convert is None:
            return None
        try:
            return self._convert(delivery.body)
        except (ValueError, RecursionError) as error:
            # msgspec's and pydantic's errors are ValueErrors, and so is UnicodeDecodeError.
            raise Unconvertible(f"the body is not what {self.name!r} takes: {error}") from error

    def _bound(self, delivery: object, body: object) -> tuple[list[object], dict[str, object]]:
        positional = [delivery if wants else body for wants in self._positional]
        if not self._named:  # the usual case, and it is once for each message
            return positional, {}
        return positional, {
            name: delivery if wants else body for name, wants in self._named.items()
        }

    def _add(self, parameter: inspect.Parameter) -> None:
        wanted = parameter.annotation
        if self._is_batch:
            wanted = _element(wanted, self.name, parameter.name)
        wants_delivery = _is_delivery(wanted)
        if not wants_delivery:
            if self._convert is not None:
                if parameter.default is not parameter.empty:
                    return
                raise InvalidRequest(
                    f"{self.name!r} has a parameter {parameter.name!r} beside the body: only one "
                    "gets the body; another one may be a Delivery, or have a default"
                )
            self._convert = converter(wanted, owner=self.name)
        if parameter.kind in _POSITIONAL:
            self._positional.append(wants_delivery)
        else:
            self._named[parameter.name] = wants_delivery


def converter(wanted: Any, *, owner: str) -> Convert:
    """Return what turns a body into what an annotation wants.

    >>> converter(str, owner="f")(b"text"), converter(dict[str, int], owner="f")(b'{"a": 1}')
    ('text', {'a': 1})
    """
    if wanted is inspect.Parameter.empty or wanted is bytes:
        return bytes
    if wanted is str:
        return bytes.decode
    if _has_pydantic(wanted):
        adapter: Any = sys.modules["pydantic"].TypeAdapter(wanted)
        validate: Convert = adapter.validate_json
        return validate
    try:
        return msgspec.json.Decoder(Any if wanted is object else wanted).decode
    except (TypeError, RecursionError) as error:
        raise InvalidRequest(f"{owner!r} cannot be given a body as {wanted!r}: {error}") from None


def name_of(function: Callable[..., object]) -> str:
    """Return what people call a function.

    >>> name_of(name_of)
    'name_of'
    """
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name).rpartition("<locals>.")[2]


def is_coroutine_function(function: Callable[..., object]) -> bool:
    """Tell whether calling gives something to be awaited; also of objects with `__call__`.

    >>> is_coroutine_function(name_of)
    False
    """
    while hasattr(function, "func") and not inspect.isroutine(function):
        function = function.func  # a functools.partial
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )


def _parameters(function: Callable[..., object], name: str) -> list[inspect.Parameter]:
    try:
        found = inspect.signature(function, eval_str=True).parameters.values()
    except NameError as error:
        raise InvalidRequest(
            f"the annotations of {name!r} cannot be read: {error}; they must be names of its module"
        ) from None
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{name!r} is not a function to be called: {error}") from None
    return [parameter for parameter in found if parameter.kind not in _VARIADIC]


def _element(wanted: Any, owner: str, parameter: str) -> Any:
    """Return what a list holds: a batch function takes lists."""
    if wanted is inspect.Parameter.empty or wanted in _LISTS:
        return inspect.Parameter.empty
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (list, *map(typing.get_origin, _LISTS[1:]), Sequence) and arguments:
        return arguments[0]
    raise InvalidRequest(
        f"{owner!r} takes batches: parameter {parameter!r} must be a list such as list[bytes], "
        f"not {wanted!r}"
    )


def _is_delivery(wanted: Any) -> bool:
    return isinstance(wanted, type) and issubclass(wanted, Message)


def _has_pydantic(wanted: Any) -> bool:
    """Tell whether an annotation names a model of pydantic, which is imported nowhere here."""
    pydantic = sys.modules.get("pydantic")
    if pydantic is None:
        return False
    if isinstance(wanted, type) and not typing.get_origin(wanted):
        return issubclass(wanted, pydantic.BaseModel) or hasattr(wanted, "__pydantic_validator__")
    return any(map(_has_pydantic, typing.get_args(wanted)))
