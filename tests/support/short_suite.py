"""What `make test` leaves out and `make test-all` has.

Its shorter form is for whoever waits: of the tests below only so many cases run, spread evenly over
all that there are. What is left out says the same of more cases, starts processes for half a
minute, or compiles for a GPU; `make planted` shows that the shorter form notices each of its bugs.
A test that is not named here always runs whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]


SHORTER: dict[str, dict[str, int]] = {
    "kernels/test_attention.py": {
        "test_gradcheck_in_float64": 2,
    },
    "kernels/test_attention_compile.py": {
        "test_compiles_whole_and_for_other_batches": 1,
        "test_compiles_with_frozen_inputs": 2,
        "test_opcheck_triton": 1,
        "test_sizes_become_dynamic_by_themselves": 2,
    },
    "kernels/test_attention_robustness.py": {
        "test_a_side_wider_than_any_history_is_no_limit": 29,
        "test_enormous_equal_logits": 5,
        "test_inputs_of_any_layout": 5,
        "test_offsets_with_gaps_in_memory": 3,
    },
    "kernels/test_autocast.py": {
        "test_autocast_changes_nothing_else": 57,
        "test_casts_in_one_graph": 1,
        "test_inputs_of_mixed_dtypes_are_cast": 14,
    },
    "kernels/test_batches.py": {
        "test_a_mapped_function": 35,
        "test_batched_gradients": 17,
    },
    "kernels/test_bias.py": {
        "test_a_bias_that_is_the_same_everywhere_changes_nothing_but_lse": 5,
        "test_causal_self_attention_over_every_length": 2,
        "test_cross_attention_with_other_lengths": 3,
        "test_everything_at_once": 2,
        "test_gradcheck_in_float64": 2,
    },
    "kernels/test_bias_calls.py": {
        "test_compiles_whole_and_for_other_batches": 1,
        "test_opcheck": 1,
    },
    "kernels/test_block_retrieval.py": {
        "test_blocks_of_other_categories_are_not_found": 2,
    },
    "kernels/test_cached_attention.py": {
        "test_every_length_in_pages_of_every_size": 2,
    },
    "kernels/test_choice.py": {
        "test_the_choice_is_the_first_that_says_nothing": 0,
        "test_what_is_said_is_what_is_launched": 4,
    },
    "kernels/test_containers_distributed.py": {
        "test_gradients_are_means_over_processes": 0,
    },
    "kernels/test_containers_in_pytorch.py": {
        "test_compiled_whole_to_the_longest_user": 0,
        "test_compiled_whole_with_containers_in_and_out": 0,
    },
    "kernels/test_dropout.py": {
        "test_every_backend_drops_exactly_the_same": 7,
        "test_outputs_and_gradients": 2,
    },
    "kernels/test_explain.py": {
        "test_no_number_is_read_or_made": 59,
    },
    "kernels/test_flops.py": {
        "test_attention_counts_the_pairs_that_are_visible": 4,
        "test_formulas_are_there_whatever_is_imported_first": 0,
        "test_statistics_count_the_scores_of_the_queries_that_count": 23,
    },
    "kernels/test_fp8_compiled.py": {
        "test_both_products_are_of_fp8": 0,
        "test_products_run_beside_the_softmax": 0,
        "test_weights_stay_in_their_registers": 0,
        "test_what_ptxas_gets_wrong": 0,
    },
    "kernels/test_gluon_policies.py": {
        "test_who_takes_it": 2,
    },
    "kernels/test_hidden_numbers.py": {
        "test_finite_numbers_are_walked_once": 5,
        "test_in_half_precision": 2,
        "test_inf_reaches_what_sees_it": 7,
        "test_nan_reaches_what_sees_it": 5,
    },
    "kernels/test_hopper.py": {
        "test_it_compiles_without_a_gpu": 0,
    },
    "kernels/test_hopper_lists.py": {
        "test_marked_parts_are_computed_again": 2,
        "test_parts_of_gradients_that_are_not_finite_are_computed_again": 3,
        "test_the_lists_of_rules_are_noted_as_they_are": 5,
    },
    "kernels/test_hopper_scores.py": {
        "test_parts_of_gradients_that_are_not_finite_are_computed_again": 2,
    },
    "kernels/test_interaction_elementwise.py": {
        "test_a_user_does_not_depend_on_where_it_lies": 5,
        "test_as_exact_as_the_reference": 39,
        "test_compiles_whole_and_for_other_batches": 1,
        "test_gradients": 7,
        "test_hardly_any_tokens": 37,
        "test_long_users_and_wide_tokens": 4,
        "test_more_pieces_than_a_merge_reads_at_once": 2,
        "test_nan_stays_with_its_user": 14,
        "test_offsets_of_either_dtype": 7,
        "test_operands_of_any_layout": 13,
        "test_softmax_of_users_that_are_held_read_twice_and_cut": 2,
    },
    "kernels/test_interaction_elementwise_cases.py": {
        "test_opcheck": 2,
    },
    "kernels/test_interaction_embedding.py": {
        "test_compiles": 0,
        "test_exact": 2,
    },
    "kernels/test_interaction_every.py": {
        "test_a_batch_without_tokens_trains": 65,
    },
    "kernels/test_interaction_products.py": {
        "test_dense_bmm_is_exact": 5,
        "test_groups_without_users_get_zeros": 2,
        "test_jagged_bmm_is_exact": 7,
        "test_linear_is_exact": 4,
        "test_matmul_is_exact": 5,
        "test_outer_is_exact": 5,
        "test_target_interaction_activations": 2,
        "test_target_interaction_is_exact": 4,
    },
    "kernels/test_interaction_products_contract.py": {
        "test_compiles": 1,
        "test_gradients": 2,
        "test_nan_stays_with_its_user": 5,
        "test_operators_are_registered_well": 2,
        "test_strides_are_read": 3,
    },
    "kernels/test_interaction_shape.py": {
        "test_compiles": 1,
        "test_exact": 18,
        "test_widths_and_int32_offsets": 12,
    },
    "kernels/test_interaction_top_k.py": {
        "test_top_k_gradients_and_graph": 0,
        "test_unique_by_keys_is_the_reference": 11,
        "test_unique_by_users_is_the_reference": 3,
    },
    "kernels/test_key_lists.py": {
        "test_every_window": 5,
        "test_kernels_compile_for_a_gpu": 0,
        "test_lists_are_built_in_a_compiled_function": 1,
        "test_the_operator_is_one": 3,
        "test_users_longer_than_said": 10,
    },
    "kernels/test_keys_attention.py": {
        "test_a_schedule_is_shared": 0,
        "test_compiles_whole_and_for_other_batches": 0,
        "test_listed_blocks_are_walked_in_pieces": 2,
        "test_lse_over_lists": 0,
        "test_other_queries_than_keys": 2,
        "test_what_is_hidden_touches_nothing": 2,
        "test_with_bias_and_dropout": 2,
        "test_with_other_weights_than_softmax": 2,
    },
    "kernels/test_layouts.py": {
        "test_a_layout_changes_no_result": 9,
        "test_no_batch_compiles_an_operation_again": 14,
        "test_no_batch_compiles_attention_again": 5,
        "test_no_batch_compiles_hopper_kernels_again": 2,
    },
    "kernels/test_lean_interpreter.py": {
        "test_the_lean_interpreter_changes_no_result": 0,
    },
    "kernels/test_meta.py": {
        "test_shapes_without_contents": 79,
    },
    "kernels/test_modules.py": {
        "test_compiles_whole": 2,
    },
    "kernels/test_partition.py": {
        "test_more_rows_than_chunks_hold_at_a_time": 2,
    },
    "kernels/test_retrieval_kernels.py": {
        "test_kernels_compile_for_a_gpu": 0,
    },
    "kernels/test_schedule_use.py": {
        "test_checks_are_asked_for_in_the_environment": 0,
    },
    "kernels/test_scissorhands.py": {
        "test_every_length_and_mask": 20,
    },
    "kernels/test_scores.py": {
        "test_compiles_whole_and_for_other_batches": 1,
        "test_users_of_a_few_tokens": 3,
        "test_what_is_hidden_touches_no_user_of_a_few_tokens": 2,
    },
    "kernels/test_second_derivatives.py": {
        "test_a_gradient_of_gradients_is_right_or_raises": 30,
        "test_a_graph_of_gradients_that_nobody_differentiates": 29,
    },
    "kernels/test_shared_memory.py": {
        "test_the_largest_tiles_of_few_queries_fit": 0,
        "test_the_largest_tiles_of_few_queries_over_lists_fit": 0,
        "test_the_largest_tiles_of_few_queries_with_all_they_can_have_fit": 0,
        "test_the_largest_tiles_over_a_cache_fit": 0,
        "test_users_of_a_few_tokens_with_every_bias_fit": 0,
    },
    "kernels/test_shared_prefix.py": {
        "test_as_with_the_prefix_in_front_of_every_user": 3,
        "test_compiles_whole_and_for_other_batches": 1,
        "test_compiles_with_many_queries": 0,
    },
    "kernels/test_short_users.py": {
        "test_exact": 4,
    },
    "kernels/test_short_users_bias.py": {
        "test_everything_at_once": 2,
        "test_exact": 3,
        "test_float16": 2,
        "test_only_what_learns_gets_a_gradient": 2,
        "test_pointwise_scores": 2,
        "test_what_is_hidden_is_in_no_gradient_of_a_bias": 3,
    },
    "kernels/test_split.py": {
        "test_every_length_under_every_policy": 4,
        "test_masks_and_scales": 3,
        "test_skews": 2,
    },
    "kernels/test_split_bias.py": {
        "test_cached": 2,
        "test_compiles_whole_and_for_other_batches": 0,
        "test_dropout": 2,
        "test_each_bias": 2,
        "test_everything_at_once": 2,
        "test_float16": 2,
        "test_it_drops_exactly_what_others_drop": 2,
        "test_opcheck": 0,
        "test_what_is_hidden_touches_nothing": 2,
    },
    "kernels/test_split_lists.py": {
        "test_as_exact_as_the_formula": 2,
        "test_compiles_whole": 0,
        "test_what_is_hidden_touches_nothing": 2,
        "test_with_a_window": 2,
        "test_with_biases_and_dropout": 2,
        "test_with_weights_by_a_policy": 2,
    },
    "kernels/test_split_scores.py": {
        "test_as_exact_as_the_formula": 2,
        "test_cached_as_exact_as_the_formula": 2,
        "test_compiles_whole_and_for_other_batches": 0,
        "test_every_element_is_written": 0,
        "test_opcheck": 0,
        "test_opcheck_of_a_cache": 0,
        "test_the_same_from_run_to_run": 0,
        "test_what_is_hidden_touches_nothing": 2,
    },
    "kernels/test_step_graphs.py": {
        "test_padding_users_hold_what_is_over_and_none_is_the_longest": 2,
    },
    "kernels/test_strided_offsets.py": {
        "test_strided_offsets_give_what_contiguous_ones_give": 17,
    },
    "kernels/test_ptxas_mistakes.py": {
        "test_what_stays_in_registers_over_lists": 0,
    },
    "kernels/test_undefined_registers.py": {
        "test_look_ups_behind_a_mask_at_head_dim_16": 0,
    },
    "notebooks/test_a_log_to_figures.py": {
        "test_parquet_with_nulls_to_figures": 0,
    },
    "notebooks/test_doit.py": {
        "test_notebooks_and_the_report_by_doit_itself": 0,
    },
    "notebooks/test_figures_command.py": {
        "test_it_needs_neither_torch_nor_the_kernels": 0,
        "test_it_says_when_the_code_behind_results_has_changed": 0,
    },
    "notebooks/test_form.py": {
        "test_presets_fit": 10,
    },
    "notebooks/test_interrupts.py": {
        "test_a_signal_ends_everything_quietly": 1,
        "test_drawing_by_several_processes_ends_quietly": 0,
        "test_nothing_outlives_a_command_that_is_killed": 0,
        "test_the_time_of_a_part_that_was_cut_off_is_kept": 0,
    },
    "notebooks/test_kills.py": {
        "test_a_training_that_is_killed_loses_and_leaves_nothing": 0,
    },
    "notebooks/test_report.py": {
        "test_it_links_the_notebook_the_data_and_every_format": 0,
    },
    "notebooks/test_reproduce.py": {
        "test_a_failed_notebook_is_named_and_the_others_go_on": 0,
    },
    "outside/test_hstu_cases.py": {
        "test_attn_without_kernels": 0,
        "test_delta_attn_small": 0,
        "test_delta_attn_without_kernels": 0,
    },
    "ranking/figures/test_figures.py": {
        "test_a_data_set_may_have_any_name": 2,
    },
    "ranking/figures/test_figures_hstu.py": {
        "test_a_smoke_run_is_marked": 0,
    },
    "ranking/figures/test_figures_interaction.py": {
        "test_a_smoke_run_is_marked": 0,
        "test_figures_show_every_operation_the_limit_and_the_goal": 0,
        "test_redraw_gives_the_same_bytes": 0,
    },
    "ranking/figures/test_figures_sparse.py": {
        "test_a_smoke_run_is_marked": 0,
        "test_redraw_gives_the_same_bytes": 0,
    },
    "ranking/figures/test_throughput_figures.py": {
        "test_a_bar_without_its_batch_is_the_step_by_the_wall": 0,
        "test_each_goal_can_be_missed": 2,
    },
    "ranking/measure/test_measure.py": {
        "test_reference_is_attention_in_float64": 3,
        "test_what_fails_is_a_row_and_never_timed": 5,
    },
    "ranking/measure/test_measure_cached.py": {
        "test_everybody_who_runs_here_is_right": 2,
        "test_what_is_wrong_is_not_timed": 2,
    },
    "ranking/measure/test_measure_hstu.py": {
        "test_everybody_is_right_and_weighed": 2,
    },
    "ranking/measure/test_measure_interaction.py": {
        "test_what_the_table_says_of_an_operation_is_so": 4,
    },
    "ranking/measure/test_measure_sparse.py": {
        "test_rows_of_a_run": 2,
    },
    "ranking/measure/test_trial.py": {
        "test_a_measurement_goes_on_without_who_failed": 0,
        "test_what_is_no_reason_to_end_a_process": 0,
        "test_who_breaks_it_has_failed_on_that_batch_and_others_go_on": 0,
        "test_who_breaks_it_on_some_batches_is_not_tried_again": 0,
    },
    "ranking/models/test_cached_ranker.py": {
        "test_logits_are_those_of_the_whole_history": 2,
        "test_the_documented_server_is_one": 0,
    },
    "ranking/models/test_models.py": {
        "test_a_request_does_not_depend_on_its_neighbours": 4,
        "test_every_field_of_the_history_matters": 13,
        "test_log_bucket": 0,
    },
    "ranking/models/test_no_padding.py": {
        "test_the_host_knows_every_size": 7,
    },
    "ranking/reproduce/test_cached_study.py": {
        "test_side_by_side_as_one_after_another": 0,
    },
    "ranking/reproduce/test_graphed_step.py": {
        "test_gradients_are_those_without_padding": 2,
        "test_logits_and_losses_are_those_without_padding": 2,
    },
    "ranking/reproduce/test_scaling_study.py": {
        "test_a_rank_that_fails_is_a_row": 0,
        "test_ranks_are_measured_in_turns_and_what_is_missing_is_a_row": 0,
    },
    "ranking/reproduce/test_streaming_study.py": {
        "test_a_log_is_prepared_trained_from_and_deleted": 0,
        "test_a_log_too_short_for_its_steps_is_a_row_that_says_so": 0,
    },
    "ranking/reproduce/test_throughput_study.py": {
        "test_steps_through_the_compiler_are_rows_of_their_own": 0,
    },
    "ranking/test_code_roots.py": {
        "test_a_change_makes_stale_what_depends_on_it": 7,
        "test_whatever_a_root_imports_is_a_root": 2,
    },
    "ranking/test_completion.py": {
        "test_no_command_needs_torch_to_be_completed": 4,
    },
    "ranking/training/test_experiment.py": {
        "test_a_comparison_that_was_cut_off_goes_on_where_it_stopped": 1,
        "test_a_process_has_its_gpu_before_cuda_starts": 0,
        "test_plans_side_by_side_give_what_each_gives_alone": 0,
    },
    "ranking/training/test_memory.py": {
        "test_memory_does_not_grow_with_the_log": 0,
    },
    "ranking/training/test_options.py": {
        "test_all_options_together_resume_to_the_bit": 1,
        "test_compiled_losses_are_the_same": 0,
    },
    "ranking/training/test_ranks.py": {
        "test_a_rank_that_is_killed_ends_all_and_the_run_goes_on": 0,
        "test_one_process_does_without_a_group": 0,
        "test_ranks_end_with_what_started_them": 0,
        "test_ranks_have_the_losses_of_one_process": 2,
        "test_what_does_not_fit_is_a_line_of_rank_0": 1,
    },
    "ranking/training/test_trainer.py": {
        "test_resume_inside_an_epoch_is_exact": 2,
    },
    "test_architecture.py": {
        "test_packages_depend_one_way": 2,
        "test_private_names_stay_in_their_room": 2,
    },
    "test_examples.py": {
        "test_an_example_says_what_happens": 26,
    },
    "test_hopper_pays.py": {
        "test_the_plain_side_is_attention": 2,
        "test_the_plain_side_over_lists_is_attention": 1,
    },
    "test_lost_gpu.py": {
        "test_a_process_by_itself_stops": 0,
        "test_another_process_goes_on": 0,
    },
    "test_old_and_new.py": {
        "test_both_are_timed_and_compared": 0,
        "test_what_cannot_be_compared_is_a_line": 1,
    },
    "test_packaging.py": {
        "test_an_installed_wheel_knows_its_presets_and_where_it_lies": 0,
        "test_an_installed_wheel_reproduces_outside_of_any_checkout": 0,
        "test_the_kernels_wheel_works_alone": 0,
    },
    "test_reference.py": {
        "test_the_reference_has_the_public_names_by_topic": 0,
    },
}


def left_out(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """What the shorter suite does not run of these."""
    cases_of: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        path = item.path
        file = path.relative_to(TESTS).as_posix() if path.is_relative_to(TESTS) else str(path)
        cases_of.setdefault((file, getattr(item, "originalname", item.name)), []).append(item)
    for (file, test), cases in cases_of.items():
        keep = SHORTER.get(file, {}).get(test, len(cases))
        # In the middle of as many equal parts: not the first ones, which often are alike.
        kept = {(2 * part + 1) * len(cases) // (2 * keep) for part in range(keep)}
        yield from (case for place, case in enumerate(cases) if place not in kept)
