"""Pipeline stages on several machines: who computes with whom. A run without stages does not load it."""

from .stage_placement import Machines, PipelineLoad, Placed, place, replace
