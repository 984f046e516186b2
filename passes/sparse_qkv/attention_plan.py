"""What replaces the projections of one attention: layers and sizes, without weights."""

from __future__ import annotations

import dataclasses

from retrofit.passes.sparse_qkv.modular_projection import ModularShape
from retrofit.sdk import AttentionSite, SiteProjection


@dataclasses.dataclass(frozen=True)
class AttentionPlan:
    """The sparse projections of one attention."""

    site: AttentionSite
    shared: ModularShape | None  # of x, for all projections that read it; None where each computes for itself
    separate: dict[str, ModularShape]  # of the projections that compute for themselves, by module
    output: ModularShape | None  # of the output layer; None where it goes without replacement, or is kept

    @property
    def parameters(self) -> int:
        """The number of parameters by the formula: separate projections of one stream share their multiplicative layer."""
        whole = [one for one in (self.shared, self.output) if one is not None]
        firsts = [self.separate[group[0].matrix.module] for group in separate_streams(self.site)]
        mults = sum(one.count() - one.count(mult=False) for one in firsts)
        return mults + sum(one.count(mult=False) for one in self.separate.values()) + sum(one.count() for one in whole)


def separate_streams(site: AttentionSite) -> list[list[SiteProjection]]:
    """The projections that compute for themselves, grouped by the stream that they read."""
    projections = site.projections if site.why_separate else site.source_projections
    streams: dict[str, list[SiteProjection]] = {}
    for one in projections:
        streams.setdefault(one.stream, []).append(one)
    return list(streams.values())
