"""Whether the code behind a user's own algorithm can be imported and does what its schema says."""

from __future__ import annotations

from collections.abc import Iterator

from slurmrl.algorithms.base import Interface
from slurmrl.algorithms.scalars import ScalarController
from slurmrl.config.schema import Config
from slurmrl.plan.algorithms import Algorithm, all_calls
from slurmrl.plan.dataflow import Call
from slurmrl.registry import import_own, resolve


def wrong_code(config: Config, algorithm: Algorithm) -> Iterator[str]:
    """Messages about interfaces and the controller that break their contract.

    :raises UsageError: one of them cannot be imported.
    """
    for call in dict.fromkeys(all_calls(config, algorithm)):
        yield from _of_call(call)
    controller = algorithm.controller()
    if not _is_class_of(import_own("controller", controller), ScalarController):
        yield f"the controller {controller} is not a subclass of {_named(ScalarController)}"


def _of_call(call: Call) -> Iterator[str]:
    what = f"the interface {call.interface} of call '{call.name}'"
    interface = import_own("interface", call.interface)
    if not _is_class_of(interface, Interface):
        yield f"{what} is not a subclass of {_named(Interface)}"
        return
    method = call.method.value
    if getattr(interface, method) is getattr(Interface, method):
        yield f"{what} does not define {method}()"
        return
    resolve(call.interface)()  # the ranks construct it without arguments too


def _is_class_of(kind: object, base: type) -> bool:
    return isinstance(kind, type) and issubclass(kind, base)


def _named(kind: type) -> str:
    return f"{kind.__module__}.{kind.__name__}"
