"""A fault: a backend that is wrong in one thing, where the suite must see it, and what it must say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from attnplug.assembly.env import BackendEnv
from attnplug.backend import AttentionBackend
from attnplug.spec import BackendSpec
from attnplug.testing.subject import Subject

from ..testing.dense_backend import DENSE, DenseBackend

Factory = Callable[[BackendEnv, BackendSpec], AttentionBackend]


@dataclass(frozen=True)
class Fault:
    """One exhibit."""

    name: str
    """The class's name with spaces."""
    make: Factory
    says: str
    """Regular expression that fault and message together must match."""
    where: str
    """Pattern of the ids of cases, of those that the quick profile draws, any of which must catch it."""
    spec: BackendSpec
    right: Factory
    """What it is a variation of: right in the same cases."""
    tries: int

    def subject(self) -> Subject:
        """Return the faulty backend, which need not be installed."""
        return Subject(self.spec.name, self.spec, lambda env: self.make(env, self.spec), torch.device("cpu"))

    def base(self) -> Subject:
        """Return the right backend that it is made from."""
        return Subject(self.spec.name, self.spec, lambda env: self.right(env, self.spec), torch.device("cpu"))


FAULTS: list[Fault] = []


def fault(
    says: str,
    where: str,
    *,
    spec: BackendSpec = DENSE,
    right: Factory = DenseBackend,
    tries: int = 3,
) -> Callable[[Factory], Factory]:
    """Add a faulty backend to the zoo.

    Args:
        says: What fault and message together must match.
        where: fnmatch pattern of case ids.
        spec: What both declare.
        right: The right backend beside it.
        tries: The first so many matching cases are run; one of them must catch it.
    """

    def add(make: Factory) -> Factory:
        words = "".join(f" {c.lower()}" if c.isupper() else c for c in make.__name__).strip()
        FAULTS.append(Fault(words, make, says, where, spec, right, tries))
        return make

    return add
