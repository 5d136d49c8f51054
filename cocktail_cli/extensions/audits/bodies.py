"""Words between the two halves of audits: bodies of Round and Report, the name of an object; figures."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from transport.protocol import messages

NAME = "audits"
AUDITED = "audit/"  # followed by a round: the tokens of the samples that a peer audits in it
Sketches = Annotated[dict[messages.Count, bytes], Meta(max_length=4096)]


class Tasks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a Round. `leases`: for each sample of the object "audit/<round>", whose gradient is to be
    sketched beside the lease, the round whose lease had it, which seeds the sketch."""

    leases: Annotated[list[messages.Count], Meta(max_length=64)]


class Answers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a Report. By the round of a lease that it delivers: the gradient sketch of each of its
    samples, one after the other, and those of the samples that were to be audited beside it."""

    sketches: Sketches = {}
    audits: Sketches = {}


class AuditFigures(msgspec.Struct):
    """Figures of a run's audits that are shown."""

    audited: messages.Count
    disagreements: messages.Count
    share: messages.Finite


class AuditStatus(msgspec.Struct):
    """Fields of a hub's status."""

    audits: AuditFigures | None = None
