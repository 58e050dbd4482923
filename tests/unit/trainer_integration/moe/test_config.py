import pytest
from pydantic import ValidationError

from omniload.base.errors import StateError
from tests.support.trainer.moe_builders import a_config, a_model
from trainer_integration.checkpoint.tensors import require_same_model
from trainer_integration.moe.config import MoEConfig, MoEShape
from trainer_integration.moe.flops import cost_of, parameter_counts


def test_a_width_that_heads_do_not_divide_is_refused_with_one_that_they_do():
    with pytest.raises(ValidationError, match=r"dim is 100 and num_heads 8.*use dim 96"):
        MoEShape(dim=100, num_heads=8)


def test_an_odd_head_width_is_refused_because_rotations_need_pairs():
    with pytest.raises(ValidationError, match="even whole number"):
        MoEShape(dim=12, num_heads=4, num_kv_heads=2)


def test_kv_heads_that_do_not_divide_the_query_heads_are_refused():
    with pytest.raises(ValidationError, match="num_heads is 4, not a multiple of num_kv_heads 3"):
        MoEShape(num_heads=4, num_kv_heads=3)


def test_more_choices_than_experts_are_refused():
    with pytest.raises(ValidationError, match="top_k is 9, more than num_experts 8"):
        MoEShape(top_k=9)


def test_a_shape_is_given_its_vocabulary():
    shape = MoEShape(dim=64, tied_embeddings=True)

    config = MoEConfig.of(shape, 300)

    assert config.vocab_size == 300
    assert config.dim == 64
    assert config.tied_embeddings


@pytest.mark.parametrize("tied", [False, True])
def test_counted_parameters_are_those_of_the_model(tied):
    config = a_config(tied_embeddings=tied)

    counts = parameter_counts(config)

    model = a_model(tied_embeddings=tied)
    assert counts.total == sum(p.numel() for p in model.parameters())


def test_active_parameters_count_only_the_experts_a_token_uses():
    config = a_config(num_layers=3, num_experts=4, top_k=1)

    counts = parameter_counts(config)

    assert counts.total - counts.active == 3 * 3 * (3 * config.dim * config.hidden)


def test_a_pair_costs_less_than_a_token_and_both_grow_with_the_layers():
    shallow, deep = cost_of(a_config(num_layers=2)), cost_of(a_config(num_layers=4))

    assert 0 < shallow[1] < shallow[0]
    assert deep[1] == 2 * shallow[1]
    assert shallow[0] < deep[0] < 2 * shallow[0]


def test_the_cost_of_a_known_shape_is_the_sum_done_by_hand():
    config = a_config(
        vocab_size=10,
        dim=4,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        hidden=3,
        num_experts=2,
        top_k=1,
    )

    # qkv 4 x 8, output 4 x 4, router 2 x 4, one expert 3 x 4 x 3, head 10 x 4.
    assert cost_of(config) == (6.0 * (32 + 16 + 8 + 36 + 40), 6.0 * 4)


def test_slow_attention_weighs_pairs_and_not_tokens():
    plain, slowed = cost_of(a_config()), cost_of(a_config(), attention_slowdown=1.5)

    assert slowed == (plain[0], 1.5 * plain[1])


def test_a_checkpoint_of_one_expert_with_weight_one_is_of_another_model(tmp_path):
    single = a_config(top_k=1)

    with pytest.raises(StateError, match="gate was None and is 'probability'"):
        require_same_model(tmp_path, single.model_dump(mode="json"), single.identity())


def test_a_checkpoint_of_an_earlier_release_fits_a_model_that_uses_nothing_later():
    of_then = set(a_config().identity())

    assert of_then.isdisjoint({"expert_groups", "capacity_factor", "z_weight", "bias_rate"})
    assert a_config(z_weight=0.1).identity()["z_weight"] == 0.1
