"""Do the tests notice? Plants known bugs, one at a time, and runs the tests that should fail.

    make planted                                        # all of them
    .venv/bin/python tests/support/planted_bugs.py --list
    .venv/bin/python tests/support/planted_bugs.py lse_base empty_user

Run it after making tests shorter or after rewriting what they test. It is not part of `make test`,
but runs tests in the shorter form that they have there: each bug starts Python anew. Nothing is
changed in this checkout: each bug is planted in a copy of its files in a temporary folder, and the
tests named beside it run there until one fails. First they all run without a bug, since tests that
fail anyway notice nothing.

A bug is an exact piece of a module's text and what takes its place. A piece that is not in its
module exactly once, and tests that are not there, are errors: rewrite the entry with the code. To
add a bug, choose one that only a wrong number betrays, a short piece that stays when code around it
changes, and as few tests as should notice it.

The status is 0 only if each bug was noticed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from shutil import copy2

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("kernels", "src", "data_prep")
# As `make test` runs them.
PYTEST = ("-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--short")
# What pytest says of a run: all passed, some failed. Everything else is no answer.
PASSED, FAILED = 0, 1


@dataclass(frozen=True)
class Bug:
    """`old` stands once in `module`; with `new` in its place, one of `tests` must fail.

    Tests are files below tests/, without "test_" and ".py", and of a file with "::" one test.
    """

    name: str
    module: str
    old: str
    new: str
    tests: tuple[str, ...]


_BLOCKS = "jagged_kernels.attention.blocks"
_FORWARD = "jagged_kernels.attention.plain.forward"
_DQ = "jagged_kernels.attention.plain.dq"
_DKV = "jagged_kernels.attention.plain.dkv"
_MEETING = "jagged_kernels.attention.triton_meeting"
_NOTES = "jagged_kernels.attention.hopper.notes"
_SHORT = "jagged_kernels.attention.plain.short"
_LISTS = "jagged_kernels.schedule.keys.triton_lists"
_METRICS = "jagged_ranking.evaluation.metrics"
_BOOTSTRAP = "jagged_ranking.evaluation.bootstrap"

BUGS = (
    # --- attention: the mask, the forward ---------------------------------------------------------
    Bug(
        "causal",
        _BLOCKS,
        "inside & (token <= seen_from + right)",
        "inside & (token < seen_from + right)",
        ("kernels/attention::test_self_attention_over_every_length",),
    ),
    Bug(
        "window_left",
        _BLOCKS,
        "inside & (token >= seen_from - left)",
        "inside & (token > seen_from - left)",
        ("kernels/attention::test_self_attention_over_every_length",),
    ),
    Bug(
        "native_window_left",
        "jagged_kernels.attention.native",
        "visible & (distance >= -left)",
        "visible & (distance > -left)",
        ("kernels/attention::test_cross_attention_with_other_lengths",),
    ),
    Bug(
        "whole_blocks_too_far",
        _BLOCKS,
        "tl.minimum(range_end, tile_start + shift + right + 1)",
        "tl.minimum(range_end, tile_start + shift + right + 17)",
        ("kernels/attention::test_self_attention_over_every_length",),
    ),
    Bug(
        "head_of_the_keys",
        _FORWARD,
        "v_ptr += (head // S.GROUP)",
        "v_ptr += (head % (S.HEADS // S.GROUP))",
        ("kernels/attention::test_grouped_query_heads",),
    ),
    Bug(
        "sums_of_an_old_largest_score",
        _FORWARD,
        "acc = acc * correction[:, None]",
        "acc = acc",
        ("kernels/attention::test_self_attention_over_every_length",),
    ),
    Bug(
        "lse_base",
        "jagged_kernels.attention.api",
        "lse2 * math.log(2)",
        "lse2",
        ("kernels/attention::test_grouped_query_heads",),
    ),
    Bug(
        "offsets_of_queries_for_keys",
        "jagged_kernels.attention.native",
        "_places(users, 0, keys, k_offsets)",
        "_places(users, 0, keys, q_offsets)",
        ("kernels/attention::test_cross_attention_with_other_lengths",),
    ),
    Bug(
        "empty_user",
        "jagged_kernels.attention.native",
        "strict=True)) if n and m]",
        "strict=True)) if n]",
        ("kernels/attention_robustness::test_users_without_history_get_zeros",),
    ),
    Bug(
        "address_of_32_bits",
        "jagged_kernels.device.memory",
        "(start + tl.full([], 0, tl.int64)) * stride",
        "(start + tl.full([], 0, tl.int32)) * stride",
        ("kernels/far_addresses",),
    ),
    Bug(
        "sides_of_32_bits",
        "jagged_kernels.schedule.window",
        "return NO_LIMIT if side >= WIDEST_SIDE else side",
        "return side",
        ("kernels/attention_robustness::test_a_side_wider_than_any_history_is_no_limit",),
    ),
    Bug(
        "dropout_by_packing",
        "jagged_kernels.attention.scores.triton_bias",
        "_mix(state ^ (k_token - k_first).to(tl.uint32))",
        "_mix(state ^ k_token.to(tl.uint32))",
        ("kernels/dropout::test_a_user_keeps_its_mask_whatever_its_neighbours_are",),
    ),
    # --- attention: which keys --------------------------------------------------------------------
    Bug(
        "a_query_too_near",
        _LISTS,
        "tl.minimum(history, newest + left + 1)",
        "tl.minimum(history, newest + left)",
        ("kernels/key_lists::test_every_window",),
    ),
    Bug(
        "targets_of_a_whole_block",
        _LISTS,
        "((end > history) & (behind | far))",
        "((end > history) & behind)",
        ("kernels/key_lists::test_every_window",),
    ),
    Bug(
        "heads_in_step",
        _LISTS,
        "phase = (group * step + offset) % stride",
        "phase = (step + offset) % stride",
        ("kernels/keys_attention::test_as_exact_as_the_formula",),
    ),
    Bug(
        "contexts_apart",
        "jagged_kernels.schedule.keys.token_rule",
        "last_context = (contexts - 1).clamp(min=0)",
        "last_context = contexts * 0",
        ("kernels/key_rules::test_a_request",),
    ),
    Bug(
        "queries_of_other_groups",
        "jagged_kernels.attention.retrieval.triton_choice",
        "queries_ptr += (tile.to(tl.int64) * GROUPS + group) * SIZE",
        "queries_ptr += tile.to(tl.int64) * GROUPS * SIZE",
        ("kernels/block_retrieval::test_lists_hold_the_best_blocks",),
    ),
    Bug(
        "tiles_that_see_over_each_other",
        "jagged_kernels.schedule.keys.triton_transpose",
        "written += tl.sum(found.to(tl.int32), 0)",
        "written += 0",
        ("kernels/transposed_lists::test_kernels_list_what_sorting_does",),
    ),
    Bug(
        "list_of_another_head",
        _MEETING,
        "+ head * S.GROUPS // S.HEADS",
        "+ 0 * head",
        ("kernels/keys_attention::test_as_exact_as_the_formula",),
    ),
    Bug(
        "list_of_another_tile",
        _MEETING,
        "tl.load(base + _USER) + (tile_start - first) // TILE",
        "tl.load(base + _USER) + tile_start // TILE - first // TILE",
        ("kernels/keys_attention::test_programs_that_share_a_tile",),
    ),
    Bug(
        "partial_blocks_taken_whole",
        _MEETING,
        "range_end), ((entry & 1) == 1) | (exists == 0)",
        "range_end), exists == 0",
        ("kernels/keys_attention::test_as_exact_as_the_formula",),
    ),
    Bug(
        "pieces_of_a_block_alike",
        _MEETING,
        "+ (index % PER_ENTRY) * BLOCK",
        "+ (index % PER_ENTRY) * 0",
        ("kernels/keys_attention::test_listed_blocks_are_walked_in_pieces",),
    ),
    Bug(
        "columns_of_no_block",
        _MEETING,
        "exists = (block >= 0) & (block <",
        "exists = (block <",
        ("kernels/keys_attention::test_columns_that_are_no_block_are_not_read",),
    ),
    Bug(
        "hopper_notes_without_the_mask",
        _NOTES,
        "cut | (start + PART > range_end)",
        "start + PART > range_end",
        ("kernels/hopper_lists::test_the_lists_of_rules_are_noted_as_they_are",),
    ),
    Bug(
        "hopper_notes_of_the_next_list",
        _NOTES,
        "(number >= 0) & (number < (end - begin) * SPLITS)",
        "number >= 0",
        ("kernels/hopper_lists::test_the_lists_of_rules_are_noted_as_they_are",),
    ),
    Bug(
        "hopper_keys_again_by_the_lists_of_queries",
        "jagged_kernels.attention.hopper.exact_backward",
        "meets_t if T.GROUPS else meets",
        "meets",
        ("kernels/hopper_lists::test_parts_of_gradients_that_are_not_finite_are_computed_again",),
    ),
    # --- attention: what a score becomes ----------------------------------------------------------
    Bug(
        "weights_of_hidden_keys",
        _FORWARD,
        'scores = tl.where(inside, scores, float("-inf") if WEIGHT is None else 0.0)',
        'scores = scores if WEIGHT else tl.where(inside, scores, float("-inf"))',
        ("kernels/scores::test_as_exact_as_the_formula",),
    ),
    Bug(
        "gradients_of_undivided_weights",
        _DQ,
        "D_SCORE(scores * _LN2, d_weights * of_query[0])",
        "D_SCORE(scores * _LN2, d_weights)",
        ("kernels/scores::test_as_exact_as_the_formula",),
    ),
    Bug(
        "gradients_of_hidden_keys",
        "jagged_kernels.attention.native",
        "d_weights.div_(_divisor(bucket, mask)).masked_fill_(~bucket.seen(), 0.0)",
        "d_weights.div_(_divisor(bucket, mask))",
        ("kernels/scores::test_as_exact_as_the_formula",),
    ),
    # --- attention: the backward ------------------------------------------------------------------
    Bug(
        "heads_of_a_group",
        _DKV,
        "for member in range(S.GROUP):",
        "for member in range(1):",
        ("kernels/attention::test_grouped_query_heads",),
    ),
    Bug(
        "gradient_of_lse",
        _DQ,
        "load_numbers(d_lse2_ptr + head, q_start, q_end, HEADS, TILE) * _LOG2_E",
        "load_numbers(d_lse2_ptr + head, q_start, q_end, HEADS, TILE)",
        ("kernels/attention::test_grouped_query_heads",),
    ),
    Bug(
        "short_users_gradient_of_lse",
        _SHORT,
        "load_numbers(d_lse2_ptr + member, start, end, S.HEADS, TILE) * _LOG2_E",
        "load_numbers(d_lse2_ptr + member, start, end, S.HEADS, TILE)",
        ("kernels/short_users",),
    ),
    Bug(
        "longest_short_user",
        _SHORT,
        "if (length > 0) & (length <= HALF):\n        bad = _forward(",
        "if (length > 0) & (length < HALF):\n        bad = _forward(",
        ("kernels/short_users",),
    ),
    Bug(
        "short_users_gradients_of_a_bias",
        _SHORT,
        "bias_slots.rows - users",
        "0",
        ("kernels/short_users_bias",),
    ),
    # --- attention: few queries over long histories -----------------------------------------------
    Bug(
        "split_weights_of_pieces",
        "jagged_kernels.attention.split.merge",
        "total += tl.sum(weights * totals, 0)",
        "total += tl.sum(totals, 0)",
        ("kernels/split::test_every_length_under_every_policy",),
    ),
    Bug(
        "split_last_piece",
        "jagged_kernels.attention.split.merge",
        "return slot, piece < pieces",
        "return slot, piece < pieces - 1",
        ("kernels/split::test_every_length_under_every_policy",),
    ),
    Bug(
        "split_scale_of_dk",
        "jagged_kernels.attention.split.backward",
        "store_block(dk_ptr, dk * scale,",
        "store_block(dk_ptr, dk,",
        ("kernels/split::test_every_length_under_every_policy",),
    ),
    Bug(
        "split_unseen_keys",
        "jagged_kernels.attention.split.unseen",
        "seen_to = tl.minimum(seen_to, token + shift + right)",
        "seen_to = seen_to",
        ("kernels/split::test_every_element_is_written",),
    ),
    Bug(
        "pages_of_all_users_alone",
        "jagged_kernels.cache.triton_append",
        "k_store.shape[0] // page_size",
        "users * page_count",
        ("kernels/history_cache::test_some_users_of_a_store",),
    ),
    # --- the schedule -----------------------------------------------------------------------------
    Bug(
        "last_row",
        "jagged_kernels.schedule.row_layout",
        "return q_tokens // tile_q + users if sort else users,",
        "return q_tokens // tile_q + users - 1 if sort else users,",
        ("kernels/attention::test_any_head_dim",),
    ),
    Bug(
        "range_of_a_row",
        "jagged_kernels.schedule.triton_rows",
        "tl.maximum(other_start, tile_start + shift - left)",
        "tl.maximum(other_start, tile_start + shift - left + 1)",
        ("kernels/attention::test_cross_attention_with_other_lengths",),
    ),
    Bug(
        "order_of_users",
        "jagged_kernels.schedule.triton_rows",
        "units < 4",
        "units < 3",
        ("kernels/schedule::test_users_on_both_sides_of_every_border_between_buckets",),
    ),
    Bug(
        "more_memory_than_there_is",
        "jagged_kernels.schedule.policy.plain",
        "(256 if small_memory else 512)",
        "512",
        ("kernels/shared_memory::test_the_largest_heads_fit",),
    ),
    # --- operators --------------------------------------------------------------------------------
    Bug(
        "second_derivative",
        "jagged_kernels.core.operators",
        "return forbidden(*given)[: len(found)]",
        "return (*forbidden(*given)[: len(found) - 1], found[-1])",
        ("kernels/second_derivatives::test_every_way_to_an_input_raises",),
    ),
    # --- interaction operations -------------------------------------------------------------------
    Bug(
        "mean_over_the_longest",
        "jagged_kernels.ops.pooling.pooling",
        "total / offsets.diff().clamp(min=1)[:, None]",
        "total / offsets.diff().max().clamp(min=1)",
        ("kernels/interaction_elementwise::test_as_exact_as_the_reference",),
    ),
    Bug(
        "mean_of_nothing",
        "jagged_kernels.ops.pooling.triton_sum",
        "total /= tl.maximum(length, 1).to(tl.float32)",
        "total /= length.to(tl.float32)",
        ("kernels/interaction_elementwise::test_as_exact_as_the_reference",),
    ),
    Bug(
        "softmax_without_the_largest",
        "jagged_kernels.ops.normalise.triton_softmax",
        "top = tl.maximum(tl.max(x, 0), LOWEST)",
        "top = tl.zeros([BLOCK], tl.float32)",
        ("kernels/interaction_elementwise_cases::test_softmax_of_enormous_scores",),
    ),
    Bug(
        "top_k_of_negative_scores",
        "jagged_kernels.device.arithmetic",
        "tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)",
        "bits",
        ("kernels/interaction_top_k::test_top_k_exact",),
    ),
    # --- containers -------------------------------------------------------------------------------
    Bug(
        "offsets_that_decrease",
        "jagged_kernels.tensors.offsets",
        "decreases = offsets[1:] < offsets[:-1]",
        "decreases = offsets.diff() < 0",
        ("kernels/jagged_tensor",),
    ),
    Bug(
        "offsets_with_gaps_in_memory",
        "jagged_kernels.tensors.jagged",
        "self.offsets = offsets.contiguous()",
        "self.offsets = offsets",
        ("kernels/strided_offsets",),
    ),
    # --- data -------------------------------------------------------------------------------------
    Bug(
        "history_at_the_same_time",
        "click_data.requests",
        "new[1:] = (user[1:] != user[:-1]) | (time[1:] != time[:-1])",
        "new[1:] = True",
        ("data/histories::test_against_a_plain_loop",),
    ),
    Bug(
        "split_inside_an_instant",
        "click_data.split",
        "for share in (train, train + valid)]",
        "for share in (train, train + valid / 2)]",
        ("data/histories::test_against_a_plain_loop",),
    ),
    Bug(
        "draws_of_the_users_own",
        "click_data.negatives",
        "good = (blocks.user[event] != user) & ~_among(request * span + item, own)",
        "good = ~_among(request * span + item, own)",
        ("data/negatives::test_against_a_plain_loop",),
    ),
    Bug(
        "draws_of_any_time",
        "click_data.negatives",
        "event = rng.integers(blocks.starts[block], blocks.starts[block + 1])",
        "event = rng.integers(0, len(blocks.item), len(slots))",
        ("data/negatives::test_nothing_alone_tells_positives_from_draws",),
    ),
    Bug(
        "draws_that_the_user_never_touches",
        "click_data.negatives",
        "if per_event > 1:",
        "touched = np.sort(blocks.user.astype(np.int64) * span + blocks.item)\n"
        "    good &= ~_among(user.astype(np.int64) * span + item, touched)\n"
        "    if per_event > 1:",
        ("data/negatives::test_being_in_the_history_says_what_returning_users_make_it_say",),
    ),
    Bug(
        "features_of_the_instant_itself",
        "click_data.candidate_features",
        "before = np.searchsorted(self.time, as_of)",
        'before = np.searchsorted(self.time, as_of, side="right")',
        ("data/candidate_features::test_against_a_plain_loop",),
    ),
    # --- models -----------------------------------------------------------------------------------
    Bug(
        "oldest_events",
        "jagged_ranking.data.store",
        "self.offsets[user.long()] + prefix.long() - length",
        "self.offsets[user.long()]",
        ("ranking/data/batch::test_batches_are_the_naive_slices",),
    ),
    Bug(
        "matches_of_what_comes_later",
        "jagged_ranking.data.matches",
        "ends = offsets[whose + some.start] - begin + columns.prefix[request]",
        "ends = offsets[whose + some.start] - begin + columns.prefix[request] + 1",
        ("ranking/data/matches::test_all_that_a_request_may_see_and_nothing_later",),
    ),
    Bug(
        "labels_among_the_features",
        "jagged_ranking.layers.head",
        "self.features(batch.features.values)]",
        "self.features(batch.features.values + batch.label.values[:, :1])]",
        ("ranking/models/models::test_what_is_asked_for_is_not_seen",),
    ),
    Bug(
        "sink",
        "jagged_ranking.layers.attention",
        "(lse - sink).sigmoid()",
        "lse.sigmoid()",
        ("ranking/models/models::test_target_attention_is_softmax_with_a_sink",),
    ),
    Bug(
        "hstu_sees_the_next_event",
        "jagged_ranking.layers.attention",
        "causal=True,\n            scale",
        "window=(-1, 1),\n            scale",
        ("ranking/models/encoders::test_an_encoder_is_its_formula",),
    ),
    Bug(
        "padded_hstu_sees_the_next_event",
        "jagged_ranking.layers.peer_attention",
        "visible = (distance >= 0)",
        "visible = (distance >= -1)",
        ("ranking/models/attentions::test_a_model_is_the_same_by_any",),
    ),
    Bug(
        "attentions_backward_is_another_part",
        "jagged_ranking.reproduce.step_parts",
        "_Mark.apply(ends, ATTENTION_BACKWARD,",
        "_Mark.apply(ends, BACKWARD,",
        ("ranking/reproduce/step_parts::test_the_parts_of_a_step_are_all_of_it",),
    ),
    Bug(
        "the_search_keeps_one_less",
        "jagged_ranking.models.encoders.sim",
        "rank = torch.arange(total, device=query.device) - offsets[candidate]",
        "rank = (torch.arange(total, device=query.device) - offsets[candidate] - 1).clamp(min=0)",
        ("ranking/models/encoders::test_an_encoder_is_its_formula",),
    ),
    Bug(
        "padding_takes_part",
        "jagged_ranking.layers.peer_attention",
        "torch.where(visible, 0.0, HIDDEN)",
        "torch.where(visible, 0.0, 0.0)",
        ("ranking/models/attentions::test_cross_attention_of_a_peer_is_ours",),
    ),
    # --- training and ranking ---------------------------------------------------------------------
    Bug(
        "the_target_among_the_drawn_items",
        "jagged_ranking.training.losses",
        "others = others.masked_fill(drawn == target[:, None], -torch.inf)",
        "pass",
        ("ranking/models/next_items::test_drawn_items_are_told_apart_but_never_from_themselves",),
    ),
    Bug(
        "ranks_among_met_items",
        "jagged_ranking.evaluation.all_items",
        "met[row, item.masked_fill(item >= num_items, 0)] = True",
        "pass",
        ("ranking/models/next_items::test_ranks_among_all_items",),
    ),
    Bug(
        "other_trials_for_one_model",
        "jagged_ranking.training.experiment",
        "[replace(one, model=model) for model in self.models for one in drawn]",
        "[replace(one, model=model) for model in self.models\n"
        "                for one in (drawn if model == self.models[0] else drawn[:1])]",
        ("ranking/training/search::test_every_model_has_the_best_of_the_same_trials",),
    ),
    Bug(
        "a_row_is_updated_twice",
        "jagged_ranking.training.optimisers",
        "weight[rows] = weight[rows] - step[:, None] * sums",
        "weight.index_add_(0, rows, -2 * step[:, None] * sums)",
        ("ranking/training/optimisers::test_steps_are_those_of_a_dense_gradient",),
    ),
    # --- metrics and provenance -------------------------------------------------------------------
    Bug(
        "gauc_without_weights",
        _METRICS,
        "np.average(value[rated], weights=impressions[rated])",
        "np.average(value[rated])",
        ("ranking/evaluation/metrics::test_gauc_is_the_weighted_mean_of_user_aucs",),
    ),
    Bug(
        "bootstrap_of_rows",
        _BOOTSTRAP,
        "users = int(group.max()) + 1\n    scored",
        "group = np.arange(len(user))\n    users = len(group)\n    scored",
        ("ranking/evaluation/bootstrap::test_users_are_drawn_not_rows",),
    ),
    Bug(
        "ties_in_auc",
        _BOOTSTRAP,
        "beaten.index_select(0, below) + beaten.index_select(0, up_to)",
        "2 * beaten.index_select(0, below)",
        ("ranking/evaluation/bootstrap::test_a_replicate_is_the_metric_of_the_users_drawn",),
    ),
    Bug(
        "stale_cache",
        "jagged_ranking.reproduce.cache",
        '        "code": code_hash(roots=roots_of(module)),\n',
        "",
        ("ranking/reproduce/cache::test_other_code_is_another_call",),
    ),
    Bug(
        "fresh_without_results",
        "jagged_ranking.reproduce.freshness",
        "    except (OSError, ValueError):  # not there, or cut off by a disk that was full\n"
        "        return False\n",
        "    except (OSError, ValueError):\n        return True\n",
        ("notebooks/reproduce::test_a_second_run_skips_what_is_fresh",),
    ),
    Bug(
        "status_of_other_code",
        "jagged_ranking.provenance",
        'same_code = status["code_hash"] == code_hash(root, TESTED)',
        'same_code = bool(status["code_hash"])',
        ("ranking/provenance",),
    ),
)


def module_path(module: str) -> Path:
    """The file of a module, below the checkout."""
    paths = [Path(folder, *module.split(".")).with_suffix(".py") for folder in FOLDERS]
    found = [path for path in paths if (ROOT / path).is_file()]
    if len(found) != 1:
        raise SystemExit(f"{module}: no such module; was it moved?")
    return found[0]


def node_id(test: str) -> str:
    """pytest's name of an entry in `Bug.tests`."""
    file, *function = test.split("::")
    folder, _, name = file.rpartition("/")
    return "::".join([Path("tests", folder, f"test_{name}.py").as_posix(), *function])


def check(bug: Bug) -> None:
    """Raises SystemExit where an entry does not fit the code any more."""
    path = module_path(bug.module)
    count = (ROOT / path).read_text(encoding="utf-8").count(bug.old)
    if count != 1:
        raise SystemExit(f"{bug.name}: stands {count} times in {path}, not once: {bug.old!r}")
    for test in bug.tests:
        file, _, function = node_id(test).partition("::")
        if not (ROOT / file).is_file():
            raise SystemExit(f"{bug.name}: no {file}")
        text = (ROOT / file).read_text(encoding="utf-8")
        if function and not re.search(rf"^def {function}\(", text, re.MULTILINE):
            raise SystemExit(f"{bug.name}: no {function} in {file}")


def run_tests(bug: Bug | None, tests: Sequence[str]) -> tuple[int, str]:
    """(pytest's status, what it printed): tests of a copy of the checkout, until one fails."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "JAGGED_"))}
    with tempfile.TemporaryDirectory(prefix="planted_") as folder:
        root = Path(folder, "checkout")
        _copy(root)
        if bug is not None:
            path = root / module_path(bug.module)
            text = path.read_text(encoding="utf-8")
            path.write_text(text.replace(bug.old, bug.new), encoding="utf-8")
        # Before the modules that are installed. COLUMNS: the summary says why a test failed.
        paths = os.pathsep.join(str(root / folder) for folder in FOLDERS)
        done = subprocess.run(
            [sys.executable, *PYTEST, *tests],
            cwd=root,
            env={**kept, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
            capture_output=True,
            text=True,
            check=False,
        )
    return done.returncode, done.stdout + done.stderr


def _copy(root: Path) -> None:
    """What git knows of, and new files that it does not ignore; no links to other folders."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        source = ROOT / name
        if source.is_file() and not name.startswith("figures/"):
            target = root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            copy2(source, target)


def verdict(bug: Bug) -> tuple[bool, str]:
    """(was it noticed, by which test and with what error)."""
    status, output = run_tests(bug, [node_id(test) for test in bug.tests])
    if status == PASSED:
        return False, "all pass: " + " ".join(bug.tests)
    summary = re.search(r"^(?:FAILED|ERROR) (.+)$", output, re.MULTILINE)
    if status != FAILED or summary is None:
        return False, f"pytest ended with {status}, which is no answer:\n{output[-3000:]}"
    return True, summary[1].removeprefix("tests/")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Plant known bugs and see whether tests notice.")
    parser.add_argument("names", nargs="*", metavar="BUG", help="by default all")
    parser.add_argument("--list", action="store_true", help="show the bugs, run nothing")
    parser.add_argument("-n", type=int, default=2, help="bugs at a time (2)")
    options = parser.parse_args(arguments)
    known = {bug.name: bug for bug in BUGS}
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"no bug {unknown[0]}; there are {', '.join(known)}")
    bugs = [known[name] for name in options.names] or list(BUGS)
    for bug in BUGS:
        check(bug)
    if options.list:
        for bug in bugs:
            print(f"{bug.name:30} {bug.module}\n{'':30} {', '.join(map(node_id, bug.tests))}")
        return 0
    status, output = run_tests(None, sorted({node_id(test) for bug in bugs for test in bug.tests}))
    if status != PASSED:
        raise SystemExit(f"without a bug these tests fail already:\n{output[-3000:]}")
    print("without a bug: all pass", flush=True)
    missed = 0
    with ThreadPoolExecutor(options.n) as pool:
        for bug, (noticed, said) in zip(bugs, pool.map(verdict, bugs), strict=True):
            missed += not noticed
            print(f"{'noticed' if noticed else 'MISSED '}  {bug.name:28} {said}", flush=True)
    print(f"{len(bugs) - missed} of {len(bugs)} bugs were noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
