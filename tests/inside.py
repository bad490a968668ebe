"""FlowKV's internals that tests name, and their places: a change that moves one changes this file.

What is public is imported from where users import it. Nothing is loaded before a test asks for it,
so what an optional package or a device brings is missed only by those tests that need it.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.clock import ManualClock  # the tests' own implementation of `Clock`

if TYPE_CHECKING:
    from flowkv.cache import (
        ahead,
        erasure,
        export,
        mover,
        overflow,
        pinned,
        seal,
        stack,
        step,
        store,
        swap,
        tier_stack,
    )
    from flowkv.cache import pool as cache_pool
    from flowkv.cache import restore as cache_restore
    from flowkv.cache.audit import due
    from flowkv.cache.block_table import Planner, relocate
    from flowkv.cache.export import MAGIC, ArchiveReader, ArchiveWriter
    from flowkv.cache.index import (
        UNKNOWN,
        Block,
        PrefixIndex,
        SwappedCopy,
        enter_tier,
        most_ghosts,
    )
    from flowkv.cache.kv import (
        PagedRow,
        bind,
        drop_unproven,
        follow,
        forget_name,
        levels,
        source,
        warn,
    )
    from flowkv.cache.kv import plan as kv_plan
    from flowkv.cache.load import LayerSlice, LoadBatch, PageLoad, PageLoader, reserve, ways
    from flowkv.cache.mover import (
        SHARE,
        IOPriority,
        Lane,
        Mover,
        Schedule,
        TransferRequest,
    )
    from flowkv.cache.pinned import Copies, CudaStreams, open_copies
    from flowkv.cache.pool import PagePool
    from flowkv.cache.requests import Prefetch
    from flowkv.cache.restore import Late, PrefixMatcher, RestoreJob
    from flowkv.cache.sequence import CLOSED, READY, Guard, Tables, session_number
    from flowkv.cache.stack import breaker
    from flowkv.cache.step import Step, current_step
    from flowkv.cache.store import ClosedTails, NextVictims, PageStore
    from flowkv.cache.swap import Copy, Footprint, decode_state, encode_state
    from flowkv.cache.tier_stack import Listing, TierStack
    from flowkv.cli import command, doctor
    from flowkv.cli.arguments import Misused, Parser
    from flowkv.cli.generate import read_prompts
    from flowkv.cli.sim import write_replay_report
    from flowkv.compiled import compile_process, compiling, machine_code
    from flowkv.compiled.compiling import Intervals, SystemClock
    from flowkv.compiled.digest import compile_digest
    from flowkv.compiled.machine_code import PART, data, directory, kept, kept_callback
    from flowkv.connect.door import Announced, Holds, Jobs, Lookup
    from flowkv.connect.hints import Retention, hint_of
    from flowkv.connect.identity import fingerprint
    from flowkv.core import digest as core_digest
    from flowkv.core import errors, interrupts, progress
    from flowkv.core.clock import Clock
    from flowkv.core.config import (
        ENVIRONMENT,
        TierConfig,
        cache_home,
        format_size,
        load_config,
        parse_place,
        parse_policy,
        parse_quota,
        parse_size,
    )
    from flowkv.core.digest import KEYS, digests
    from flowkv.core.digest import digest as digest_of
    from flowkv.core.errors import (
        BusyError,
        CapacityError,
        ConfigError,
        GeometryError,
        MissingDependencyError,
        MissingLibraryError,
        NonFiniteError,
        StateError,
        StoreError,
        TokenError,
        UnsupportedModelError,
        did_you_mean,
    )
    from flowkv.core.files import open_regular
    from flowkv.core.geometry import (
        CODEC_SHIFT,
        GRANULE_BYTES,
        GRANULE_MASK,
        INDEXERS,
        ITEMSIZE,
        PageLayout,
        codec_of,
        page_id,
        page_layout,
    )
    from flowkv.core.geometry import CODECS as layout_CODECS
    from flowkv.core.keys import KEY_BYTES, ROOT, KeyChain, as_tokens, tenant_salt, within
    from flowkv.core.memory import HUGE_BYTES, address_of, own_memory, populate
    from flowkv.core.reaper import REAPER
    from flowkv.demo import findings as demo_findings
    from flowkv.demo import run
    from flowkv.demo.findings import (
        DemoCase,
        DemoPlan,
        DemoSizes,
        Findings,
        Sample,
        WatchedRestore,
        build_workload,
        summarise,
    )
    from flowkv.demo.timing import timed_generate
    from flowkv.engine import engine as engine_engine
    from flowkv.engine import invariant as engine_invariant
    from flowkv.engine import request, sampling, scheduler
    from flowkv.engine.engine import make_request
    from flowkv.engine.invariant import Fixed, Products, invariant, marked
    from flowkv.engine.request import AnswerSource, _Ear, tell
    from flowkv.engine.runner import Forward, OpenRow, PackedRunner, Runner, own_model
    from flowkv.engine.sampling import (
        UNEVEN,
        Choice,
        Drawn,
        Largest,
        OwnSampler,
        UnreadTokens,
        Weighted,
        draw,
        seed_of,
    )
    from flowkv.engine.scheduler import RunningRequest
    from flowkv.hooks import blend as edits
    from flowkv.hooks import graphs
    from flowkv.hooks.blend import History, KnownText, Rewrite
    from flowkv.hooks.graphs import GraphedForward, StaticStep, shape_of
    from flowkv.hooks.huggingface import calibrate, door, load, restore, rows, serve
    from flowkv.hooks.huggingface import load as smollm2
    from flowkv.hooks.huggingface.attach import _LOCK as attach_lock
    from flowkv.hooks.huggingface.attach import door_of
    from flowkv.hooks.huggingface.attention import MaskRecipe, Packing, PagedView, Unpackable, mask
    from flowkv.hooks.huggingface.cache import (
        PagedCache,
        PagedLayer,
        Recurrent,
        place_layers,
        read_layer,
    )
    from flowkv.hooks.huggingface.cache_control import CacheControl, cache_control, without_hints
    from flowkv.hooks.huggingface.door import ForwardHook
    from flowkv.hooks.huggingface.inputs import Fill, ForwardCall, placeholder_ids, usual
    from flowkv.hooks.huggingface.packing import PackedLayer
    from flowkv.hooks.huggingface.press import Press, Repetition, with_positions, words_of
    from flowkv.hooks.huggingface.restore import Nested, Restoring, discard
    from flowkv.hooks.huggingface.restore import Part as restore_Part
    from flowkv.hooks.huggingface.rows import Rows as rows_Rows
    from flowkv.hooks.huggingface.runners import ApartRow, GenerateSampler, PaddedRunner, Parts
    from flowkv.hooks.huggingface.versions import overlay_window
    from flowkv.kernels import dispatch, operands, reference
    from flowkv.kernels.cascade import Group, shared_prefixes
    from flowkv.kernels.cpu import operations as attention
    from flowkv.kernels.cpu import operations as cpu_pool
    from flowkv.kernels.cpu import operations as pages
    from flowkv.kernels.cpu.attend import NIBBLES, SIGNED, UNSIGNED, dots_of
    from flowkv.kernels.cpu.bits import FAST, exp2, narrow, order, tanh, unorder, widen
    from flowkv.kernels.cpu.operations import address
    from flowkv.kernels.dispatch import NON_FINITE, OUT_OF_RANGE, SOUND, check_batch
    from flowkv.kernels.loss import bounds, by_token, turning
    from flowkv.kernels.operands import DeviceTimer, Later
    from flowkv.kernels.reference import decoded, narrowed, page_views, rotate, transcode
    from flowkv.kernels.triton import attend, codec, few, flight, many, move, task
    from flowkv.kernels.triton import kvt as triton_kvt
    from flowkv.kernels.triton import launch as triton_launch
    from flowkv.kernels.triton.attend import paged_attention
    from flowkv.kernels.triton.launch import interpreted, launch
    from flowkv.kernels.triton.many import falling
    from flowkv.kernels.triton.move import append_kernel
    from flowkv.kernels.triton.sealed import rotation, sealed_config, turn
    from flowkv.kernels.triton.task import merge_two
    from flowkv.kernels.triton.tile import FLIP_SIGNS, SPLIT_DIGITS, SPLIT_NIBBLES
    from flowkv.kernels.triton.tile import MOST as tile_MOST
    from flowkv.kvt import basis as kvt_basis
    from flowkv.kvt import codec as kvt_codec
    from flowkv.kvt import device as kvt_device
    from flowkv.kvt import tier as kvt_tier
    from flowkv.kvt.basis import (
        Basis,
        KeyTurn,
        KeyTurns,
        chunk_places,
        most_basis_bytes,
    )
    from flowkv.kvt.basis import digest as basis_digest
    from flowkv.kvt.codec import PageCoder, codable, read_head
    from flowkv.kvt.device import CodedPage, DeviceDecoder, DeviceQueue
    from flowkv.kvt.entropy import (
        CLASSES,
        SHIFTS,
        SYMBOLS,
        CodedSymbols,
        SymbolTables,
        deviation_class,
    )
    from flowkv.kvt.entropy import count as count_symbols
    from flowkv.kvt.file import BasisFile, OpenBasis, open_basis, save_basis
    from flowkv.kvt.learning import GroupLearner, coded_pages, search
    from flowkv.kvt.rows import RowCoder, RowForm, row_bases
    from flowkv.kvt.tier import CodecTier, PageBases, coded_forms
    from flowkv.naming import computation, identity
    from flowkv.naming import fingerprint as fingerprint_of_weights
    from flowkv.naming.computation import Walk
    from flowkv.naming.fingerprint import UnnamedError, Weights, version_of
    from flowkv.naming.identity import CALLS, Identity
    from flowkv.observe import events, recording
    from flowkv.observe.events import (
        Admitted,
        Audited,
        Bus,
        Defragmented,
        Demoted,
        Encoded,
        EngineStep,
        Event,
        Evicted,
        Failed,
        Finished,
        Hit,
        Miss,
        Preempted,
        Promoted,
        Published,
        Quarantined,
        Queued,
        Remembered,
        Restored,
        RestoreEnded,
        RestoreSpan,
        RowsRead,
        StepPlanned,
        Stored,
        Warned,
    )
    from flowkv.observe.metrics import (
        COUNT_BUCKETS,
        NAMES,
        NEWEST,
        OTHERS,
        RULES,
        SECONDS_BUCKETS,
        Histogram,
        Level,
        Metrics,
        Series,
        Spread,
        Tenancy,
    )
    from flowkv.observe.otel import Bridge
    from flowkv.observe.prometheus import Exporter
    from flowkv.observe.recording import Writer
    from flowkv.observe.timeline import (
        LATENCIES,
        Lanes,
        Meeting,
        RequestLane,
        RequestPhase,
        Serving,
        Timeline,
        Timelines,
        TraceFile,
    )
    from flowkv.policy import admission as write_admission
    from flowkv.policy import pages as policy_pages
    from flowkv.policy import warming as warming_module
    from flowkv.policy.admission import RULES as WRITE_RULES
    from flowkv.policy.admission import WriteAdmission
    from flowkv.policy.base import (
        CUT_OFF,
        NEVER_NS,
        NO_SLOTS,
        NO_VISIT,
        TOOL_USE,
        TURN_END,
        UNKNOWN_STOP,
    )
    from flowkv.policy.by_score import ByScore, _keys
    from flowkv.policy.hazard.compiled import (
        BASE_LIMIT,
        BASES,
        BEFORE,
        BEYOND,
        BINS,
        BUCKETS,
        EDGES_NS,
        FEATURES,
        MOST_INDEX,
        REACH,
        SIZES,
        STARTS,
        TIP,
        TIPS,
        TRAITS,
        WEIGHT_LIMIT,
        WIDTHS,
        beyond,
        bin_of,
        decay,
        hazard,
        hinted_index,
        index,
        key_of,
        logistic,
        teach,
        value_of,
    )
    from flowkv.policy.hazard.compiled import describe as compiled_describe
    from flowkv.policy.hedge import STAKE, fresh_model, is_model
    from flowkv.policy.optimum import NOT_AGAIN, belady, next_uses
    from flowkv.policy.order.compiled import (
        BIRTHS,
        BLOCKED,
        DUES,
        EXPIRED,
        GHOSTS,
        HINTED,
        LEAVES,
        LISTS,
        ONCE,
        SIZE,
        SLOT_LIMIT,
        TARGET,
        Array,
        aged,
        kernel,
        log2,
        softplus2,
    )
    from flowkv.policy.order.compiled import SECOND as compiled_SECOND
    from flowkv.policy.order.leaf import FIRST_CAPACITY, LeafOrder, as_slots
    from flowkv.policy.pages import (
        STATE_RULES,
        Defragmentation,
        Importance,
        Ladder,
        Occupancy,
        Samples,
        SavedState,
        StatePlacement,
        Verdict,
        make_ladder,
    )
    from flowkv.policy.prefetch.markov import Markov
    from flowkv.policy.prefetch.prefetcher import (
        HINT,
        LEARNED,
        QUEUE,
        Hint,
        RegretGuard,
        class_of,
    )
    from flowkv.policy.restore.costs import LoadGate, Rates
    from flowkv.policy.restore.policy import Prices, TwoPointer, best_split
    from flowkv.policy.scheduling import WaitingLine, Worth
    from flowkv.policy.tenants import Quota, Tenants
    from flowkv.policy.warming import (
        _COMPILED,
        FEW_VISITS,
        CompiledPolicies,
        Warming,
        every_call,
        warming,
    )
    from flowkv.report import screen, words
    from flowkv.report.account import Account, restore_section, serving_sections
    from flowkv.report.charts import (
        MOST_CURVES,
        Chart,
        Curves,
        Distributions,
        Gantt,
        Overlap,
        OverTime,
    )
    from flowkv.report.page import Bars, Figures, Section, Table, Text, render_report, write_report
    from flowkv.report.page import Part as page_Part
    from flowkv.report.words import seconds
    from flowkv.residency.blocks import (
        HALF,
        KEY,
        NOTHING,
        Ids,
        as_ids,
        buckets_for,
        cut,
        factors,
        find,
        put,
        rehash,
    )
    from flowkv.residency.keeper import HOLD_S
    from flowkv.residency.places import KeyedPolicy, PolicyPlace
    from flowkv.sim import formats
    from flowkv.sim.character import lru_hit_ratios, stack_distances
    from flowkv.sim.formats import Reader, read_mooncake, read_sessions
    from flowkv.sim.generate import KINDS as generate_KINDS
    from flowkv.sim.generate import MarkovTraceConfig, bursts, poisson, transitions, walk
    from flowkv.sim.hardware import CODECS as hardware_CODECS
    from flowkv.sim.hardware import HARDWARE, MODELS, Shape, block_costs
    from flowkv.sim.replay import (
        OnePlace,
        PlaceStack,
        ReplayTier,
        bounds_of,
        first_tokens_s,
        pages_of,
        share_of,
        tier_from,
    )
    from flowkv.sim.restore import Decoder
    from flowkv.sim.trace import TraceHints, hints_of, next_turns, read_npz, wide
    from flowkv.tensors import embedding
    from flowkv.tensors import weights as weights_module
    from flowkv.tensors.checkpoint import Checkpoint
    from flowkv.tensors.embedding import KNOWN_BYTES as ROW_KNOWN_BYTES
    from flowkv.tensors.embedding import LEAST_KNOWN, EmbeddingTable, write_table
    from flowkv.testing import Faults
    from flowkv.testing import storage as tier_machine
    from flowkv.testing.planners import (
        CheckedTurns,
        MadeUpCosts,
        RestoreStory,
        RestoreWorld,
        SchedulerStory,
        SchedulerWorld,
    )
    from flowkv.testing.planners import restore_worlds as restores_worlds
    from flowkv.testing.planners import scheduler_worlds as schedulers_worlds
    from flowkv.testing.policies import SECOND as policies_SECOND
    from flowkv.testing.policies import requests, steps_ns
    from flowkv.testing.storage import PAGE_KINDS as codecs_KINDS
    from flowkv.testing.storage import Frame, Model, TierRequest, page_of
    from flowkv.testing.stories import VerificationError, require
    from flowkv.tiers import digest, erasure_log, host
    from flowkv.tiers import digest as tiers_digest
    from flowkv.tiers import frame as envelope
    from flowkv.tiers import frame as tiers_frame
    from flowkv.tiers import host as slots
    from flowkv.tiers import io as tiers_io
    from flowkv.tiers.base import UNBOUNDED, aligned, evictable, listed
    from flowkv.tiers.digest import CHECK, REASONS, STREAMED_BYTES, check_frames, seal_frames
    from flowkv.tiers.disk import home as journal
    from flowkv.tiers.disk import tier as transfer
    from flowkv.tiers.disk.home import (
        CHARGE_BYTES,
        DELETED,
        RECORD_BYTES,
        RECORDS,
        ROW,
        STORED,
        Held,
        Journal,
        Record,
        Slot,
        Superblock,
        newest,
        pack_page,
        pack_record,
        peek_store_id,
        read_page,
        read_superblock,
        sensible,
        unpack_row,
        write_superblock,
    )
    from flowkv.tiers.disk.home import PAGE_BYTES as journal_PAGE_BYTES
    from flowkv.tiers.disk.home import Rows as journal_Rows
    from flowkv.tiers.disk.inspect import FrameShare, Inspection, drop, inspect, repair, scrub
    from flowkv.tiers.disk.store import Index, open_journal, slot_granules
    from flowkv.tiers.disk.tier import DiskScheduler, Flight, seal_all
    from flowkv.tiers.erasure_log import (
        MOST_KEYS,
        Erased,
        ErasureLog,
        ErasureLogs,
        new_entry,
        realm_name,
    )
    from flowkv.tiers.frame import (
        AES_256_GCM,
        DIGEST_AT,
        MAX_STRIPES,
        NH_128,
        XXH3_128,
        FrameCipher,
        Integrity,
        Keyring,
        SealedFrame,
        accept,
        fixed_fields,
        header_bytes,
        lay_out,
        most_header_bytes,
        pack_header,
        place,
        stored_sizes,
        verify_stripes,
    )
    from flowkv.tiers.frame import KINDS as frame_KINDS
    from flowkv.tiers.frame import describe as frame_describe
    from flowkv.tiers.host import HostTier, SlotPool
    from flowkv.tiers.io import engine as io_engine
    from flowkv.tiers.io import open_engine, uring
    from flowkv.tiers.io.engine import (
        COMPLETION,
        MOST_BYTES,
        OPERATION,
        READ,
        SYNC,
        WRITE,
        Arena,
        ArenaSlot,
        Buffer,
        Extents,
        FileIO,
        IOEngine,
        Operations,
        Reports,
        ThreadsEngine,
    )
    from flowkv.tiers.io.engine import PAGE_BYTES as staging_PAGE_BYTES
    from flowkv.tiers.io.engine import Completions as engine_Completions
    from flowkv.tiers.io.uring import UringEngine
    from flowkv.tiers.lossless import AGAIN, SAMPLES, Lossless, unpack_stripe
    from flowkv.tiers.remote import mooncake, objects
    from flowkv.tiers.remote import redis as redis_tier
    from flowkv.tiers.remote.backend import CHANGED, Listed
    from flowkv.tiers.remote.erasures import AGAIN_S, MOST_ENTRIES, RemoteErasures
    from flowkv.tiers.remote.mooncake import Mooncake, MooncakeTier
    from flowkv.tiers.remote.nixl import Nixl, NixlTier
    from flowkv.tiers.remote.objects import (
        MOST_CATALOGS,
        ObjectBackend,
        ObjectTier,
        decode_catalog,
        encode_catalog,
    )
    from flowkv.tiers.remote.redis import Redis, RedisTier
    from flowkv.tiers.remote.tier import (
        FAILURES,
        Aside,
        Breaker,
        BreakerState,
        Fact,
        Known,
        OperationRates,
        Pass,
        attempt,
    )
    from flowkv.tiers.shared import INDEX_AT, LEAST_BYTES, FileLayout, file_name, table
    from flowkv.tiers.shared import plan as tier_plan
    from flowkv.tiers.worker import Completions as worker_Completions
    from flowkv.tiers.worker import Item, ThreadMemory, Workers

_PLACES = {
    alias.asname or alias.name: (statement.module or "", alias.name)
    for statement in ast.walk(ast.parse(Path(__file__).read_text()))
    if isinstance(statement, ast.ImportFrom) and str(statement.module).startswith("flowkv")
    for alias in statement.names
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"tests.inside has no {name}. Add the import that brings it")
    module, there = _PLACES[name]
    try:
        found = getattr(importlib.import_module(module), there)
    except AttributeError:  # a module of a package
        return importlib.import_module(f"{module}.{there}")
    if getattr(found, "targetoptions", {}).get("no_cpython_wrapper"):  # a part of compiled calls
        import numba

        @numba.njit(error_model="numpy")
        def called(*given):  # type: ignore[no-untyped-def]
            return found(*given)

        return called
    return found
