"""Compilation of functions that only compiled ones call: as parts of those, not on their own.

By itself numba optimises every function together with all that it calls, and makes machine code for
each, although most of it never runs: a function called five deep is worked on six times. A part
stays in the form of the frontend until a function that Python calls is optimised, with all of its
parts at once.
"""

from __future__ import annotations

from typing import Any

import numba

TRIED = (0, 68)
"""The latest release of numba with internals that are known to fit this module."""


def _pipeline() -> type[Any]:
    """Return numba's own pipeline except its last step, which leaves code for others to link."""
    from numba.core.codegen import JITCodeLibrary
    from numba.core.compiler import Compiler
    from numba.core.compiler_machinery import register_pass
    from numba.core.typed_passes import NativeLowering

    class PartLibrary(JITCodeLibrary):
        """Code of a part and of the functions it calls, for libraries that link it."""

        def _optimize_final_module(self) -> None:
            """Do nothing: the library that links this one does it."""

        def _finalize_final_module(self) -> None:
            self._finalize_dynamic_globals()
            self._finalized = True

    @register_pass(mutates_CFG=True, analysis_only=False)
    class PartLowering(NativeLowering):
        """Lowering of a function for compiled callers only."""

        _name = "part_lowering"

        def run_pass(self, state: Any) -> bool:
            """Lower the function and fill `state.cr`."""
            state.library = PartLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
            state.flags.no_compile = True
            super().run_pass(state)
            made = state["cr"]
            key = [made].pop  # of a type that numba takes, equal to no other, and never called
            state.targetctx.insert_user_function(key, made.fndesc, [state.library])
            state["cr"] = made._replace(cfunc=key)
            return True

    class PartCompiler(Compiler):
        """Compiler of parts."""

        def define_pipelines(self) -> list[Any]:
            """Return the passes, in order."""
            made: list[Any] = super().define_pipelines()
            for manager in made:
                passes = manager.passes
                manager.passes = [
                    (PartLowering, why) if step is NativeLowering else (step, why)
                    for step, why in passes
                ]
                manager.finalize()
            return made

    return PartCompiler


PART: dict[str, Any] = {
    "error_model": "numpy",
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}
"""Options of `numba.njit` for parts."""
# later releases are unknown: there parts compile like other functions
if numba.version_info.short <= TRIED:
    PART["pipeline_class"] = _pipeline()
