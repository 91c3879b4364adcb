"""The worker's greedy tokens are those of transformers on the same weights."""

import pytest
import torch

from deepseek_worker.sequence import Request, SamplingParams
from deepseek_worker.tokenizer import load_tokenizer

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

LENGTHS = (1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 48, 64, 65, 90, 112, 128, 150, 200, 260)
NUM_NEW = 12
TEXT = """
A river begins where rain has nowhere else to go. In the hills above the town the water gathers
in hollows, runs over stone, and finds its way between roots until it is wide enough to have a
name. The people of the valley measured their year by it: high in April, when the snow went, and
low in September, when children crossed it on foot. A miller kept a record of its height from
1811 to 1873, three lines a day, and those lines are still the longest account of the weather
that anybody in the county has. He wrote down what he saw and what it cost him. On the fourth of
May the bank gave way and took the wheel with it. On the ninth the wheel was found, eleven miles
below, in a field of barley. The capital of France is far away from such rivers, he wrote, and
yet the same water passes both. def height(day): return record[day] if day in record else None.
"""


@pytest.fixture(scope="module")
def prompts(trained_model):
    ids = load_tokenizer(trained_model).encode(TEXT)
    starts = [(7 * index) % 40 for index in range(len(LENGTHS))]
    return [ids[start : start + length] for start, length in zip(starts, LENGTHS, strict=True)]


@pytest.fixture(scope="module")
def reference(trained_model):
    """Transformers' own reading of the same file, by code that shares nothing with ours."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        trained_model.parent, gguf_file=trained_model.name, dtype=torch.float32
    ).eval()


@pytest.fixture(scope="module")
def alone(trained_model, prompts):
    """Every prompt by itself, in an engine without a cache."""
    from deepseek_worker.config import EngineConfig
    from deepseek_worker.startup import load_engine

    torch.set_num_threads(1)
    config = EngineConfig(model=trained_model, device="cpu", prefix_cache=False)
    engine = load_engine(config, lambda _: None)
    answers = []
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
        engine.add(Request(str(index), tuple(prompt), sampling))
        tokens = []
        while engine.has_work():
            tokens += [token for output in engine.step() for token in output.token_ids]
        answers.append(tokens)
    return answers


@torch.inference_mode()
def test_each_token_is_the_likeliest_of_transformers(reference, prompts, alone):
    for prompt, answer in zip(prompts, alone, strict=True):
        # Position p of a greedy answer depends only on what is before it, so that one forward
        # pass over the whole answer checks every token of it.
        logits = reference(torch.tensor([prompt + answer[:-1]])).logits[0]
        likeliest = logits[len(prompt) - 1 :].argmax(-1).tolist()
        assert answer == likeliest, f"prompt of {len(prompt)} tokens"


@torch.inference_mode()
def test_generate_of_transformers_gives_the_same_answer(reference, prompts, alone):
    for index in (0, 7, 14):
        answer = reference.generate(
            torch.tensor([prompts[index]]),
            attention_mask=torch.ones(1, len(prompts[index]), dtype=torch.int64),
            max_new_tokens=NUM_NEW,
            min_new_tokens=NUM_NEW,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0]
        assert answer[len(prompts[index]) :].tolist() == alone[index]


def test_mixed_batches_chunks_and_cached_prefixes_change_no_token(
    trained_model, prompts, alone, make_engine, generate
):
    engine = make_engine(trained_model, max_batch_tokens=48, kv_cache_bytes=2**28)

    cold = generate(engine, prompts, max_tokens=NUM_NEW, ignore_eos=True)
    num_cached_before = engine.stats().num_cached_tokens
    warm = generate(engine, prompts, max_tokens=NUM_NEW, ignore_eos=True)

    assert cold == alone
    assert warm == alone
    assert engine.stats().num_cached_tokens - num_cached_before >= sum(LENGTHS) // 2


def test_a_pool_too_small_for_all_changes_no_token(
    trained_model, prompts, alone, make_engine, generate
):
    engine = make_engine(trained_model, kv_cache_bytes=24 * 737_280)

    assert generate(engine, prompts, max_tokens=NUM_NEW, ignore_eos=True) == alone
    assert engine.stats().num_preemptions > 0


def test_sixty_four_equal_prompts_at_once_answer_as_one_alone(
    trained_model, prompts, alone, make_engine, generate
):
    engine = make_engine(trained_model, kv_cache_bytes=2**29)

    answers = generate(engine, [prompts[8]] * 64, max_tokens=8, ignore_eos=True)

    assert answers == [alone[8][:8]] * 64


def test_the_capital_of_france_is_paris(trained_model, make_engine, generate):
    tokenizer = load_tokenizer(trained_model)

    (answer,) = generate(
        make_engine(trained_model, kv_cache_bytes=2**26),
        [tokenizer.encode("The capital of France is")],
        max_tokens=8,
    )

    assert "Paris" in tokenizer.decode(answer)


def test_loading_the_trained_model_is_predicted_to_the_byte(trained_model, make_engine):
    stats = make_engine(trained_model).stats()

    assert stats.measured_bytes["weights"] == stats.predicted_bytes["weights"]
    assert stats.measured_bytes["kv_cache"] == stats.predicted_bytes["kv_cache"]
    assert stats.measured_bytes["workspace"] <= stats.predicted_bytes["workspace"]
