"""The stable interface between the library and its passes: all names that a pass may import.

This module is the core. Names that fewer passes need are in submodules: `retrofit.sdk.anatomy` for the parts of models, `program`
for the captured graph, `modules` for replacements and wrappers, `data` for fitting a start. A pass imports from these and from its
own package, and from nothing else in `retrofit`. docs/write_a_pass.md builds a pass.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

# The definition of a pass: options, a plan of the rewrite, an edit that makes it.
from retrofit.passbase.protocol import Pass as Pass
from retrofit.passbase.protocol import Plan as Plan
from retrofit.passbase.protocol import Rewrite as Rewrite
from retrofit.passbase.protocol import Recovery as Recovery
from retrofit.passbase.options import depth_ranges as depth_ranges
from retrofit.passbase.options import option as option
from retrofit.passbase.options import selected_depths as selected_depths
from retrofit.passbase.options import selected_layers as selected_layers
from retrofit.surgery import Edit as Edit
from retrofit.surgery import Rearranged as Rearranged

# Inputs and results of `plan`.
from retrofit.anatomy import Anatomy as Anatomy
from retrofit.anatomy.parts import Stack as Stack
from retrofit.anatomy.parts import Layer as Layer
from retrofit.anatomy.parts import Branch as Branch
from retrofit.anatomy.module_sites import WrappedModule as WrappedModule
from retrofit.anatomy.parts import Site as Site
from retrofit.anatomy.parts import NearMiss as NearMiss
from retrofit.anatomy.parts import collect_near_miss as collect_near_miss
from retrofit.anatomy.parts import unfit as unfit

# Refusals.
from retrofit.errors import RetrofitError as RetrofitError
from retrofit.errors import CaptureError as CaptureError
from retrofit.errors import DoesNotFitError as DoesNotFitError
from retrofit.errors import SpecError as SpecError
from retrofit.errors import Remedy as Remedy

# Modules around others.
from retrofit.surgery.wrappers import Wrapper as Wrapper
from retrofit.surgery.wrappers import ArgumentPlace as ArgumentPlace
from retrofit.surgery.wrappers import argument_at as argument_at
from retrofit.surgery.wrappers import argument_place as argument_place
from retrofit.surgery.wrappers import find_argument as find_argument
from retrofit.surgery.wrappers import item_at as item_at
from retrofit.surgery.wrappers import map_first as map_first
from retrofit.surgery.wrappers import with_item as with_item

# The independent implementation, for the check `method`.
from retrofit.passbase.method_reference import MethodReference as MethodReference
from retrofit.passbase.method_reference import ModuleReference as ModuleReference
from retrofit.passbase.method_reference import Inside as Inside
from retrofit.passbase.method_reference import OneOf as OneOf
from retrofit.passbase.method_reference import SiteCall as SiteCall
from retrofit.passbase.method_reference import Deviation as Deviation
from retrofit.passbase.method_reference import Observed as Observed
from retrofit.passbase.method_reference import ObservedSite as ObservedSite
from retrofit.passbase.method_reference import Problems as Problems
from retrofit.passbase.method_reference import may_be_chance as may_be_chance
from retrofit.passbase.method_reference import spread_problem as spread_problem

RINGS = ("anatomy", "program", "modules", "data")

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Return a name of a submodule: `retrofit.sdk` once had all names, and other packages may still import them from here."""
        for ring in () if name.startswith("__") else RINGS:
            module = importlib.import_module(f"{__name__}.{ring}")
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
