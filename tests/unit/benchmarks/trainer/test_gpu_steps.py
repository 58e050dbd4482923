from benchmarks.trainer.gpu_steps import CONTENDERS, SIZES, Times, table_of


def test_steps_are_set_beside_those_of_a_batch_that_is_there():
    least, *others = CONTENDERS
    found = {least: Times(running_s=0.010, waiting_s=[0.020] * 99 + [0.5])}
    found |= {name: Times(running_s=0.011, waiting_s=[0.030] * 100) for name in others}

    first, second, *_ = table_of(SIZES[0], found).rows

    assert first == (least, "10.00", "+0.0%", "20.00", "+0.0%", "24.80")
    assert second[1:] == ("11.00", "+10.0%", "30.00", "+50.0%", "30.00")


def test_a_size_names_its_tokens_a_step():
    assert SIZES[-1].title == "8 layers 1,024 wide, 65,536 tokens a step"
