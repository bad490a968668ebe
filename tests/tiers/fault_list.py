"""The list of faults and threats, and the tests that show what happens (docs/explain/tiers.md).

F: what breaks by itself. S: what somebody breaks. Names are `file::test`, below `tests/`.
"""

from __future__ import annotations

_LIST = """
F1 a process is killed at any moment
  tiers/test_disk_kill.py::test_F1_kill
  tiers/test_shared.py::test_a_peer_killed_in_the_middle_of_a_change
  tiers/test_simulation.py::test_one_hazard_at_a_time
  tiers/remote/test_redis.py::test_killed_with_a_log_nothing_acknowledged_is_lost
  tiers/remote/test_objects.py::test_nothing_is_lost_when_the_server_is_killed
F2 power fails: sectors are lost, torn, reordered
  tiers/test_disk_power.py::test_F2_power_loss
  tiers/test_simulation.py::test_nothing_is_ever_wrong
  tiers/test_simulation.py::test_other_bytes_may_be_lost_in_any_combination
F3 a bit flips: in a body, a header, the journal, on the wire
  tiers/test_disk_faults.py::test_F3_flipped_bits
  tiers/test_disk_faults.py::test_F3_any_bit_of_a_frame
  tiers/test_disk_faults.py::test_F3_a_journal_page_costs_its_records_at_most
  tiers/test_envelope.py::test_every_bit_of_a_small_frame_counts
  tiers/test_check.py::test_every_bit_counts
  tiers/test_shared.py::test_a_flipped_bit_is_a_miss_and_the_frame_is_gone
  tiers/remote/test_tier.py::test_every_bit_of_a_small_frame
  tiers/remote/test_redis_faults.py::test_rot_on_every_stripe_is_found
F4 a slot is given to another frame while it is read
  tiers/test_interleavings.py::test_disk
  tiers/test_interleavings.py::test_shared
  tiers/test_disk_overdue.py::test_a_slot_is_not_reused_while_it_is_read
  tiers/test_disk.py::test_a_frame_that_moves_while_a_reader_reads
  tiers/test_shared.py::test_a_frame_replaced_while_it_is_read_is_read_again
F5 a store fails half way: the disk is full, writes are short, the device errs
  tiers/test_disk_faults.py::test_F5_any_operation_may_fail
  tiers/test_disk_faults.py::test_F5_a_disk_that_stays_full
  tiers/test_disk_faults.py::test_F5_a_disk_that_cannot_read
  tiers/test_disk_journal.py::test_nothing_stays_of_an_append_that_failed
  tiers/test_disk_full.py::test_F5_what_a_full_disk_confirmed_is_there
  tiers/test_disk_power.py::test_F2_power_loss
  tiers/test_simulation.py::test_one_hazard_at_a_time
  tiers/remote/test_tier.py::test_a_late_store_reads_nothing_and_is_undone
F6 memory is used again before a device has read or written it
  cache/test_pinned.py::test_a_page_is_saved_as_its_slow_producer_left_it
  cache/test_pinned.py::test_every_order_of_the_device_gives_the_same_bytes
  cache/test_pinned.py::test_a_slot_is_not_used_before_its_copy_is_over
  tiers/test_disk_overdue.py::test_an_overdue_load_does_not_touch_its_target
F7 an engine hangs, is slow, dead or flapping
  tiers/remote/test_tier.py::test_a_hung_engine_costs_three_deadlines
  tiers/remote/test_tier.py::test_a_flapping_engine
  tiers/remote/test_tier.py::test_a_late_reply_never_lands_in_a_reused_buffer
  tiers/remote/test_redis.py::test_a_frozen_server_costs_deadlines_and_nothing_else
  tiers/remote/test_objects.py::test_a_frozen_server_costs_three_deadlines
  tiers/remote/test_mooncake.py::test_a_frozen_server_costs_deadlines_and_nothing_else
  tiers/remote/test_guard.py::test_breaker_against_a_model
  tiers/test_disk_overdue.py::test_too_much_retired_memory_opens_the_breaker
  tiers/test_shared.py::test_a_stopped_peer_hangs_nobody
F8 any of the wanted frames cannot be loaded
  tiers/test_faults.py::test_F8_logits_are_those_of_no_cache
  cache/test_store.py::test_a_load_that_fails_is_a_miss_and_never_an_answer
  cache/test_restore.py::test_damaged_files_miss
F9 another model, layout, dtype, revision or shard asks
  core/test_keys.py::test_every_field_of_a_namespace_matters
  tiers/test_envelope.py::test_fields_cannot_be_mutated
  tiers/test_check.py::test_every_fixed_field_is_compared
  cache/test_restore.py::test_whatever_differs_misses
  hooks/test_never_wrong.py::test_changed_weights_are_not_served_from_disk
F10 a disk fills up; two processes use one directory
  tiers/test_disk.py::test_F10_the_quota_holds_on_the_disk
  tiers/test_disk.py::test_F10_second_process_reads_along
  tiers/test_disk.py::test_F10_exclusive
  tiers/test_disk_home.py::test_never_two_writers
  tiers/test_disk_home.py::test_what_is_no_longer_ours_is_not_written
  tiers/test_shared.py::test_capacity_is_physical
  tiers/test_conformance.py::test_disk_tier_and_a_reader
F11 another version wrote it
  tiers/test_disk.py::test_F11_another_format_is_moved_aside
  tiers/test_disk.py::test_F11_a_reader_of_another_format_is_empty
  tiers/test_shared.py::test_another_format_is_an_empty_tier
F12 io_uring is denied, memory cannot be locked, O_DIRECT is not there
  tiers/test_disk_engines.py::test_F12_io_uring_denied
  tiers/test_disk_engines.py::test_F12_little_locked_memory
  tiers/test_disk_engines.py::test_F12_no_direct_io
  tiers/io/test_ladder.py::test_conformance_where_io_uring_is_denied
F13 a stray pointer writes into shared memory: tables, links, counters, frames
  tiers/test_shared.py::test_random_damage_to_memory_in_use
  tiers/test_shared.py::test_a_table_that_contradicts_itself_is_thrown_away_by_all_once
  tiers/test_shared.py::test_lies_with_right_checks_lead_nowhere
  tiers/test_shared.py::test_any_damage_is_repaired_or_thrown_away
S1 two pages have one key
  tiers/test_faults.py::test_S1_a_collision_is_a_miss
  core/test_keys.py::test_golden_vectors_are_what_the_specification_says
  tiers/remote/test_redis_faults.py::test_the_frame_of_another_key_is_a_miss
S2 a tenant learns what another one asked
  tiers/test_faults.py::test_S2_work_does_not_depend_on_another_tenant
  tiers/test_faults.py::test_S2_time_does_not_depend_on_another_tenant
  cache/test_properties.py::test_what_one_tenant_stores_never_changes_what_another_is_answered
  cache/test_properties.py::test_a_secret_makes_keys_of_equal_prompts_unguessable
S3 an attacker writes to the disk or the server
  tiers/test_aead.py::test_attacks_are_refused
  tiers/test_aead.py::test_no_downgrade
  tiers/test_aead.py::test_no_plaintext_is_stored
  cache/test_erasure.py::test_an_encrypted_disk_never_holds_plaintext
S4 stored bytes become code
  test_house.py::test_no_bytes_are_trusted
  tiers/test_faults.py::test_S4_the_audit_hook_bites
S5 ports are opened
  tiers/test_faults.py::test_S5_no_port_is_opened_for_others
S6 a compressed frame is a bomb
  tiers/test_lossless.py::test_bombs_and_lies_are_refused
  tiers/test_lossless.py::test_a_bomb_takes_no_memory
S7 names of tenants, models and directories are hostile; links and permissions
  tiers/test_faults.py::test_S7_hostile_names_make_no_paths
  tiers/test_faults.py::test_S7_hostile_keys_find_nothing
  tiers/test_disk.py::test_links_are_not_followed
  tiers/test_disk.py::test_permissions
  tiers/test_shared.py::test_the_file_must_be_ours_alone
  tiers/test_shared.py::test_names_are_no_paths
  tiers/remote/test_objects.py::test_names_are_hex_and_nothing_else
S8 bytes of another tenant lie in reused memory
  tiers/test_envelope.py::test_stale_bytes_of_reused_places_are_never_returned
  tiers/test_check_tier.py::test_wrong_tier_is_found
  tiers/test_shared.py::test_erased_bytes_are_nowhere
  cache/test_erasure.py::test_the_bytes_of_a_tenant_are_gone_from_the_disk
S9 keys and metadata without end
  tiers/test_faults.py::test_S9_memory_is_bounded
  tiers/remote/test_tier.py::test_what_is_known_is_bounded
  tiers/remote/test_tier.py::test_retired_memory_is_bounded
S10 bytes lie about lengths and shapes
  tiers/test_faults.py::test_S10_frames
  tiers/test_faults.py::test_S10_directories
  tiers/test_disk_hostile.py::test_numbers_that_no_store_comes_to
  tiers/test_disk_hostile.py::test_one_bad_load_never_fails_its_batch
  tiers/test_disk_hostile.py::test_what_is_read_does_not_follow_the_length
  tiers/test_disk_inspect.py::test_work_is_bounded_by_the_capacity_whatever_files_claim
  tiers/test_faults.py::test_S10_archives
  tiers/test_frame.py::test_noise_is_no_frame
  tiers/test_envelope.py::test_noise_raises_nothing_but_bad_frames
  tiers/test_envelope.py::test_headers_that_lie_about_lengths_reserve_no_memory
  tiers/test_check.py::test_rows_that_lie_lead_nowhere
  tiers/remote/test_redis_replies.py::test_garbage_raises_only_typed_errors
  tiers/remote/test_objects.py::test_catalogs_of_noise
  cache/test_export.py::test_no_damage_gives_a_wrong_byte
"""

FAULTS: dict[str, tuple[str, list[str]]] = {}
for _line in _LIST.strip().splitlines():
    _first, _, _rest = _line.partition(" ")
    if _first:
        FAULTS[_first] = _rest, []
    else:
        _last = next(reversed(FAULTS.values()))
        _last[1].append(_line.strip())
