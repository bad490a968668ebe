"""FlowKV's internals that tests name, and their places: a change that moves one changes this file.

What is public is imported from where users import it. Nothing is loaded before a test asks for it,
so what an optional package or a device brings is missed only by those tests that need it.
"""

from __future__ import annotations

import importlib
from typing import Any

from tests.clock import ManualClock  # the tests' own implementation of `Clock`

_TABLE = """
flowkv.cache: ahead cache_pool=pool cache_restore=restore ending erasure export listing mover
  overflow pinned seal stack step store swap
flowkv.cache.audit: due
flowkv.cache.block_table: Planner relocate
flowkv.cache.export: ArchiveReader ArchiveWriter MAGIC
flowkv.cache.index: Block enter_tier most_ghosts PrefixIndex SwappedCopy UNKNOWN
flowkv.cache.kv: bind drop_unproven follow forget_name kv_plan=plan levels PagedRow source warn
flowkv.cache.later: DeviceTimer Later
flowkv.cache.listing: Listing
flowkv.cache.load: LayerSlice LoadBatch PageLoad PageLoader reserve ways
flowkv.cache.mover: IOPriority Lane Mover Schedule SHARE TransferRequest
flowkv.cache.pinned: Copies CudaStreams open_copies
flowkv.cache.pool: PagePool
flowkv.cache.requests: Prefetch
flowkv.cache.restore: Late PrefixMatcher RestoreJob
flowkv.cache.sequence: CLOSED Guard READY session_number Tables
flowkv.cache.stack: breaker
flowkv.cache.step: CURRENT Step
flowkv.cache.store: ClosedTails NextVictims PageStore Samples Verdict
flowkv.cache.swap: Copy decode_state encode_state Footprint
flowkv.cache.tier_stack: TierStack
flowkv.cli: command doctor
flowkv.cli.arguments: Misused Parser
flowkv.cli.generate: read_prompts
flowkv.cli.sim: write_replay_report
flowkv.compiled: compile_process compiling machine_code
flowkv.compiled.addresses: data
flowkv.compiled.compiling: Intervals SystemClock
flowkv.compiled.digest: compile_digest
flowkv.compiled.machine_code: directory kept kept_callback
flowkv.compiled.parts: PART
flowkv.connect.door: Announced Holds Jobs Lookup
flowkv.connect.hints: hint_of Retention
flowkv.connect.identity: fingerprint
flowkv.core: core_digest=digest errors interrupts progress
flowkv.core.clock: Clock
flowkv.core.config: cache_home ENVIRONMENT format_size load_config parse_place parse_policy
  parse_quota parse_size TierConfig
flowkv.core.digest: digest_of=digest digests KEYS
flowkv.core.errors: BusyError CapacityError ConfigError did_you_mean GeometryError
  MissingDependencyError MissingLibraryError NonFiniteError StateError StoreError TokenError
  UnsupportedModelError
flowkv.core.files: open_regular
flowkv.core.geometry: codec_of CODEC_SHIFT GRANULE_BYTES granule_of INDEXERS ITEMSIZE
  layout_CODECS=CODECS page_id page_layout PageLayout
flowkv.core.keys: as_tokens KEY_BYTES KeyChain ROOT tenant_salt within
flowkv.core.memory: address_of HUGE_BYTES own_memory populate
flowkv.core.reaper: REAPER
flowkv.demo: demo_findings=findings run
flowkv.demo.findings: build_workload DemoCase DemoPlan DemoSizes Findings Sample summarise
  WatchedRestore
flowkv.demo.timing: timed_generate
flowkv.engine: engine_engine=engine engine_invariant=invariant request sampling scheduler
flowkv.engine.engine: make_request
flowkv.engine.invariant: Fixed invariant marked Products
flowkv.engine.request: _Ear AnswerSource tell
flowkv.engine.runner: Forward OpenRow own_model PackedRunner Runner
flowkv.engine.sampling: Choice draw Drawn Largest OwnSampler seed_of UNEVEN UnreadTokens Weighted
flowkv.engine.scheduler: RunningRequest
flowkv.hooks: edits graphs
flowkv.hooks.blend: Rewrite
flowkv.hooks.edits: History KnownText
flowkv.hooks.graphs: GraphedForward shape_of StaticStep
flowkv.hooks.huggingface: calibrate door load restore rows serve smollm2
flowkv.hooks.huggingface.attach: attach_lock=_LOCK door_of
flowkv.hooks.huggingface.attention: mask MaskRecipe Packing PagedView Unpackable
flowkv.hooks.huggingface.cache: PagedCache PagedLayer place_layers read_layer Recurrent
flowkv.hooks.huggingface.cache_control: cache_control CacheControl without_hints
flowkv.hooks.huggingface.door: ForwardHook
flowkv.hooks.huggingface.inputs: Fill ForwardCall placeholder_ids usual
flowkv.hooks.huggingface.packing: PackedLayer
flowkv.hooks.huggingface.press: Press with_positions words_of
flowkv.hooks.huggingface.repetition: Repetition
flowkv.hooks.huggingface.restore: discard Nested restore_Part=Part Restoring
flowkv.hooks.huggingface.rows: rows_Rows=Rows
flowkv.hooks.huggingface.runners: ApartRow GenerateSampler PaddedRunner Parts
flowkv.hooks.huggingface.versions: overlay_window
flowkv.kernels: dispatch operands reference registry
flowkv.kernels.cascade: Group shared_prefixes
flowkv.kernels.cpu: attention=operations cpu_pool=operations entries pages=operations
flowkv.kernels.cpu.attend: dots_of NIBBLES SIGNED UNSIGNED
flowkv.kernels.cpu.bits: exp2 FAST narrow order tanh unorder widen
flowkv.kernels.cpu.operations: address
flowkv.kernels.dispatch: check_batch check_scoring NON_FINITE OUT_OF_RANGE SOUND
flowkv.kernels.loss: bounds by_token turning
flowkv.kernels.reference: decoded narrowed page_views rotate transcode
flowkv.kernels.triton: attend codec few flight many move task triton_kvt=kvt triton_launch=launch
flowkv.kernels.triton.attend: paged_attention
flowkv.kernels.triton.launch: interpreted launch
flowkv.kernels.triton.many: falling
flowkv.kernels.triton.move: append_kernel
flowkv.kernels.triton.sealed: rotation sealed_config turn
flowkv.kernels.triton.task: merge_two
flowkv.kernels.triton.tile: FLIP_SIGNS SPLIT_DIGITS SPLIT_NIBBLES tile_MOST=MOST
flowkv.kvt: kvt_basis=basis kvt_codec=codec kvt_device=device kvt_tier=tier
flowkv.kvt.basis: Basis basis_digest=digest chunk_places KeyTurn KeyTurns most_basis_bytes
flowkv.kvt.codec: codable PageCoder read_head
flowkv.kvt.device: CodedPage DeviceDecoder DeviceQueue
flowkv.kvt.entropy: CLASSES CodedSymbols count_symbols=count deviation_class SHIFTS SYMBOLS
  SymbolTables
flowkv.kvt.file: BasisFile open_basis OpenBasis save_basis
flowkv.kvt.learning: coded_pages GroupLearner search
flowkv.kvt.rows: row_bases RowCoder RowForm
flowkv.kvt.tier: CodecTier coded_forms PageBases
flowkv.naming: computation fingerprint_of_weights=fingerprint identity memory_words
flowkv.naming.computation: Walk
flowkv.naming.fingerprint: UnnamedError version_of Weights
flowkv.naming.identity: CALLS Identity
flowkv.observe: events recording
flowkv.observe.events: Admitted Audited Bus Defragmented Demoted Encoded EngineStep Event Evicted
  Failed Finished Hit Miss Preempted Promoted Published Quarantined Queued Remembered Restored
  RestoreEnded RestoreSpan RowsRead StepPlanned Stored Warned
flowkv.observe.metrics: COUNT_BUCKETS Histogram Level Metrics NAMES NEWEST OTHERS RULES
  SECONDS_BUCKETS Series Spread Tenancy
flowkv.observe.otel: Bridge
flowkv.observe.prometheus: Exporter
flowkv.observe.recording: Writer
flowkv.observe.timeline: Lanes LATENCIES Meeting RequestLane RequestPhase Serving Timeline Timelines
  TraceFile
flowkv.policy: warming_module=warming write_admission=admission
flowkv.policy.admission: WRITE_RULES=RULES WriteAdmission
flowkv.policy.base: CUT_OFF NEVER_NS NO_SLOTS NO_VISIT TOOL_USE TURN_END UNKNOWN_STOP
flowkv.policy.by_score: _keys ByScore
flowkv.policy.hazard.compiled: BASE_LIMIT BASES BEFORE BEYOND beyond bin_of BINS BUCKETS
  compiled_describe=describe decay EDGES_NS FEATURES hazard hinted_index index key_of logistic
  MOST_INDEX REACH SIZES STARTS teach TIP TIPS TRAITS value_of WEIGHT_LIMIT WIDTHS
flowkv.policy.hazard.index: fresh_model is_model
flowkv.policy.hedge: STAKE
flowkv.policy.optimum: belady next_uses NOT_AGAIN
flowkv.policy.order.compiled: aged Array BIRTHS BLOCKED compiled_SECOND=SECOND DUES EXPIRED GHOSTS
  HINTED kernel LEAVES LISTS log2 ONCE SIZE SLOT_LIMIT softplus2 TARGET
flowkv.policy.order.leaf: as_slots FIRST_CAPACITY LeafOrder
flowkv.policy.pages: Defragmentation Importance Ladder make_ladder Occupancy
flowkv.policy.prefetch.markov: Markov
flowkv.policy.prefetch.prefetcher: class_of HINT Hint LEARNED QUEUE RegretGuard
flowkv.policy.restore.costs: LoadGate Rates
flowkv.policy.restore.policy: best_split Prices TwoPointer
flowkv.policy.scheduling: WaitingLine Worth
flowkv.policy.states: SavedState STATE_RULES StatePlacement
flowkv.policy.tenants: Quota Tenants
flowkv.policy.warming: _COMPILED CompiledPolicies every_call FEW_VISITS Warming warming
flowkv.report: screen words
flowkv.report.account: Account restore_section serving_sections
flowkv.report.charts: Chart Curves Distributions Gantt MOST_CURVES Overlap OverTime
flowkv.report.page: Bars Figures page_Part=Part render_report Section Table Text write_report
flowkv.report.words: seconds
flowkv.residency.blocks: as_ids buckets_for cut factors find HALF Ids KEY NOTHING put rehash
flowkv.residency.keeper: HOLD_S
flowkv.residency.keyed: KeyedPolicy PolicyPlace
flowkv.sim: formats
flowkv.sim.character: lru_hit_ratios stack_distances
flowkv.sim.formats: read_mooncake read_sessions Reader
flowkv.sim.generate: bursts generate_KINDS=KINDS MarkovTraceConfig poisson transitions walk
flowkv.sim.hardware: block_costs HARDWARE hardware_CODECS=CODECS MODELS Shape
flowkv.sim.replay: bounds_of first_tokens_s OnePlace pages_of PlaceStack ReplayTier share_of
  tier_from
flowkv.sim.restore: Decoder
flowkv.sim.trace: hints_of next_turns read_npz wide
flowkv.tensors: embedding weights_module=weights
flowkv.tensors.checkpoint: Checkpoint
flowkv.tensors.embedding: EmbeddingTable LEAST_KNOWN ROW_KNOWN_BYTES=KNOWN_BYTES write_table
flowkv.testing: Faults tier_machine=storage
flowkv.testing.planners: CheckedTurns MadeUpCosts restores_worlds=restore_worlds RestoreStory
  RestoreWorld schedulers_worlds=scheduler_worlds SchedulerStory SchedulerWorld
flowkv.testing.policies: policies_SECOND=SECOND requests steps_ns
flowkv.testing.storage: codecs_KINDS=PAGE_KINDS Frame Model page_of TierRequest
flowkv.testing.stories: require VerificationError
flowkv.tiers: digest envelope erasure_log host slots tiers_digest=digest tiers_frame=frame
  tiers_io=io
flowkv.tiers.base: evictable listed UNBOUNDED
flowkv.tiers.digest: CHECK check_frames REASONS seal_frames STREAMED_BYTES
flowkv.tiers.disk: journal transfer=tier
flowkv.tiers.disk.home: read_superblock Superblock write_superblock
flowkv.tiers.disk.inspect: drop FrameShare inspect Inspection repair scrub
flowkv.tiers.disk.journal: CHARGE_BYTES DELETED Held Journal journal_PAGE_BYTES=PAGE_BYTES
  journal_Rows=Rows newest pack_page pack_record peek_store_id read_page Record RECORD_BYTES RECORDS
  ROW sensible Slot STORED unpack_row
flowkv.tiers.disk.store: Index open_journal slot_granules
flowkv.tiers.disk.tier: DiskScheduler Flight seal_all
flowkv.tiers.envelope: FrameCipher Integrity Keyring SealedFrame
flowkv.tiers.erasure_log: Erased ErasureLog ErasureLogs MOST_KEYS new_entry realm_name
flowkv.tiers.frame: accept AES_256_GCM aligned DIGEST_AT fixed_fields frame_describe=describe
  frame_KINDS=KINDS header_bytes lay_out MAX_STRIPES most_header_bytes NH_128 pack_header place
  stored_sizes verify_stripes XXH3_128
flowkv.tiers.host: HostTier
flowkv.tiers.io: io_engine=engine open_engine uring
flowkv.tiers.io.engine: Arena ArenaSlot Buffer COMPLETION engine_Completions=Completions Extents
  FileIO IOEngine MOST_BYTES OPERATION Operations READ Reports staging_PAGE_BYTES=PAGE_BYTES SYNC
  ThreadsEngine WRITE
flowkv.tiers.io.uring: UringEngine
flowkv.tiers.lossless: AGAIN Lossless SAMPLES unpack_stripe
flowkv.tiers.remote: mooncake objects redis_tier=redis
flowkv.tiers.remote.backend: CHANGED Listed
flowkv.tiers.remote.erasures: AGAIN_S MOST_ENTRIES RemoteErasures
flowkv.tiers.remote.mooncake: Mooncake MooncakeTier
flowkv.tiers.remote.nixl: Nixl NixlTier
flowkv.tiers.remote.objects: decode_catalog encode_catalog MOST_CATALOGS ObjectBackend ObjectTier
flowkv.tiers.remote.redis: Redis RedisTier
flowkv.tiers.remote.tier: Aside attempt Breaker BreakerState Fact FAILURES Known OperationRates Pass
flowkv.tiers.shared: file_name FileLayout INDEX_AT LEAST_BYTES table tier_plan=plan
flowkv.tiers.slots: SlotPool
flowkv.tiers.worker: Item ThreadMemory worker_Completions=Completions Workers
"""
"""Modules and what tests import of them, as `shown=there` where the name here is another one."""

_PLACES: dict[str, tuple[str, str]] = {}
for _word in _TABLE.split():
    if _word.endswith(":"):
        _module = _word[:-1]
    else:
        _shown, _, _there = _word.partition("=")
        _PLACES[_shown] = _module, _there or _shown


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"tests.inside has no {name}. Add it to the table")
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
