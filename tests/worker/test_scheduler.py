"""Scheduling as a game of counts: no model, tokens are made up."""

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deepseek_worker.scheduler import (
    LEAST_PROMPT_TOKENS,
    MAX_TIMES_PASSED,
    Batch,
    Scheduler,
    StepLimits,
)
from deepseek_worker.sequence import UNKNOWN_TOKEN, Request, SamplingParams, Sequence

EOS = 99
_orders = itertools.count()


def scheduler(**changes) -> Scheduler:
    options = {
        "num_pages": 16,
        "page_tokens": 4,
        "max_running_requests": 8,
        "limits": StepLimits.plain(32),
        "prefix_cache": True,
    }
    return Scheduler(**(options | changes))


def sequence(prompt, max_tokens=4, salt="", **sampling) -> Sequence:
    prompt = tuple(range(prompt)) if isinstance(prompt, int) else tuple(prompt)
    request = Request("r", prompt, SamplingParams(max_tokens=max_tokens, **sampling), salt)
    return Sequence(request, next(_orders), len(prompt) + max_tokens, frozenset({EOS}))


def run(scheduler: Scheduler, batch: Batch, token: int = 7) -> list[Sequence]:
    """Commit a batch as the engine does; returns the sequences it finished."""
    finished = []
    for entry in batch.entries:
        is_sampled = scheduler.advance(entry)
        scheduler.register(entry)
        done = entry.end == entry.sequence.max_total_tokens
        if is_sampled:
            done = scheduler.resolve(entry, token) is not None
        if done:
            scheduler.finish(entry.sequence)
            finished.append(entry.sequence)
    scheduler.check()
    return finished


def run_to_end(scheduler: Scheduler, max_steps: int = 1000) -> list[Sequence]:
    finished = []
    for _ in range(max_steps):
        batch = scheduler.schedule()
        if not batch.entries:
            break
        finished += run(scheduler, batch)
    assert not scheduler.has_work()
    return finished


def work(batch: Batch) -> list[tuple[Sequence, int, int]]:
    return [(entry.sequence, entry.start, entry.num_tokens) for entry in batch.entries]


def test_without_requests_the_batch_is_empty():
    assert scheduler().schedule().entries == ()


def test_a_prompt_that_fits_is_read_in_one_step_and_then_decodes():
    subject = scheduler()
    request = sequence(6)
    subject.add(request)

    first = subject.schedule()
    run(subject, first)
    second = subject.schedule()

    assert work(first) == [(request, 0, 6)]
    assert work(second) == [(request, 6, 1)]


def test_a_long_prompt_is_read_in_chunks_beside_decoding():
    subject = scheduler(limits=StepLimits.plain(8))
    short, long = sequence(2), sequence(20)
    subject.add(short)
    run(subject, subject.schedule())
    subject.add(long)

    batches = []
    for _ in range(3):
        batch = subject.schedule()
        batches.append(work(batch))
        run(subject, batch)

    assert batches[0] == [(short, 2, 1), (long, 0, 7)]
    assert batches[1] == [(short, 3, 1), (long, 7, 7)]
    assert batches[2] == [(short, 4, 1), (long, 14, 6)]


LIMITS = StepLimits(tokens=2048, short_tokens=704, chunks=9)


def step_beside(num_decoding, num_prompts):
    """The tokens of a step with decoding sequences and prompts of 1024 tokens."""
    subject = scheduler(num_pages=10**6, max_running_requests=10**4, limits=LIMITS)
    for _ in range(num_decoding):
        subject.add(sequence(1, 99))
    while subject.waiting:
        run(subject, subject.schedule())
    for _ in range(num_prompts):
        subject.add(sequence([1] * 1024))
    return subject.schedule().num_tokens


def test_a_step_that_decoding_waits_for_is_short_unless_much_waits():
    assert step_beside(2, 1) == 704
    assert step_beside(2, 4) == 704
    assert step_beside(2, 8) == 1024
    assert step_beside(2, 9) == 1280
    assert step_beside(2, 200) == 2048


def prompts_of_steps(lengths, limits=LIMITS):
    """What each step reads of prompts with these lengths, beside four sequences that decode."""
    subject = scheduler(
        num_pages=10**6, max_running_requests=10**4, limits=limits, prefix_cache=False
    )
    for _ in range(4):
        subject.add(sequence(1, 99))
    run(subject, subject.schedule())
    for length in lengths:
        subject.add(sequence([1] * length, max_tokens=1))
    steps = []
    while subject.waiting or any(not other.is_decoding for other in subject.running):
        batch = subject.schedule()
        steps.append([entry.num_tokens for entry in batch.entries if entry.num_tokens > 1])
        run(subject, batch)
    return steps


def test_a_step_is_an_eighth_longer_where_that_ends_a_prompt():
    assert prompts_of_steps([787]) == [[787]]
    assert prompts_of_steps([788]) == [[700], [88]]
    # The last of three prompts that arrive together ends in the fourth step, not the fifth.
    assert prompts_of_steps([950, 950, 950]) == [[700], [250, 450], [500, 200], [750]]


def test_a_step_takes_one_prompt_more_but_not_the_beginning_of_another():
    assert prompts_of_steps([400, 380, 900]) == [[400, 380], [700], [200]]


def test_no_step_is_longer_than_the_longest():
    limits = StepLimits(tokens=716, short_tokens=704, chunks=9)

    assert prompts_of_steps([712], limits) == [[712]]
    assert prompts_of_steps([713], limits) == [[700], [13]]


def test_many_decoding_sequences_do_not_stop_prompts():
    assert step_beside(900, 1) == 900 + LEAST_PROMPT_TOKENS


def test_without_decoding_sequences_a_step_is_as_long_as_it_may_be():
    assert step_beside(0, 5) == 2048


def test_chunks_in_a_step_are_limited():
    subject = scheduler(num_pages=100, limits=StepLimits(100, 100, chunks=2))
    for length in (6, 6, 6, 1):
        subject.add(sequence(length))

    batch = subject.schedule()

    assert [entry.num_tokens for entry in batch.entries] == [6, 6]


def test_admission_waits_for_the_pages_of_the_whole_prompt():
    subject = scheduler(num_pages=4, limits=StepLimits.plain(4))
    first, second = sequence(8), sequence(8)
    subject.add(first)
    subject.add(second)

    subject.schedule()

    assert list(subject.running) == [first]
    assert subject.waiting == [second]


def test_a_small_request_passes_one_that_does_not_fit_yet():
    subject = scheduler(num_pages=8)
    running, large, small = sequence(16, 8), sequence(24), sequence([5, 6])
    for request in (running, large, small):
        subject.add(request)

    subject.schedule()

    assert list(subject.running) == [running, small]
    assert large.num_times_passed == 1


def test_nothing_passes_a_request_that_was_passed_often_enough():
    subject = scheduler(num_pages=8)
    running, large, small = sequence(16, 8), sequence(24), sequence([5, 6])
    large.num_times_passed = MAX_TIMES_PASSED
    for request in (running, large, small):
        subject.add(request)

    subject.schedule()

    assert list(subject.running) == [running]


def test_a_decoding_sequence_without_a_page_preempts_the_cheapest_but_never_the_oldest():
    subject = scheduler(num_pages=6, prefix_cache=False)
    oldest, dear, cheap = sequence([1] * 3, 12), sequence([2] * 7, 8), sequence([3] * 4, 8)
    for request in (oldest, dear, cheap):
        subject.add(request)
    run(subject, subject.schedule())
    while not subject.num_preemptions:
        run(subject, subject.schedule())

    assert cheap.num_preemptions == 1
    assert cheap in subject.waiting
    assert oldest in subject.running
    assert cheap.num_generated_tokens > 0
    assert set(run_to_end(subject)) == {oldest, dear, cheap}


def test_a_preempted_sequence_finds_its_own_pages_again():
    subject = scheduler(num_pages=16)
    request = sequence(8, 8)
    subject.add(request)
    run(subject, subject.schedule())
    run(subject, subject.schedule())
    subject._preempt(request)

    batch = subject.schedule()

    assert work(batch) == [(request, 8, 2)]
    assert request.num_cached_tokens == 0


def test_what_a_sequence_held_before_a_preemption_is_distrusted_too():
    subject = scheduler()
    request = sequence(10, 8)
    subject.add(request)
    run(subject, subject.schedule())
    subject._preempt(request)

    subject.distrust(request)
    subject.finish(request)
    subject.add(again := sequence(10, 8))

    assert work(subject.schedule()) == [(again, 0, 10)]
    subject.check()


def test_a_second_equal_prompt_starts_behind_the_cached_pages():
    subject = scheduler()
    subject.add(sequence(10, 1))
    run_to_end(subject)
    again = sequence(10, 1)
    subject.add(again)

    batch = subject.schedule()

    assert work(batch) == [(again, 8, 2)]
    assert again.num_cached_tokens == 8


def test_a_page_is_shared_once_answers_have_filled_it():
    subject = scheduler()
    subject.add(sequence(range(6), 4))
    run_to_end(subject)
    longer = sequence([*range(6), 7, 7, 7], 1)
    subject.add(longer)

    assert work(subject.schedule()) == [(longer, 8, 1)]


def test_the_last_prompt_token_is_computed_even_when_all_its_pages_are_cached():
    subject = scheduler()
    subject.add(sequence(8, 1))
    run_to_end(subject)
    again = sequence(8, 1)
    subject.add(again)

    assert work(subject.schedule()) == [(again, 4, 4)]


def test_salts_keep_prefixes_apart():
    subject = scheduler()
    subject.add(sequence(10, 1, salt="a"))
    run_to_end(subject)
    other = sequence(10, 1, salt="b")
    subject.add(other)

    assert work(subject.schedule()) == [(other, 0, 10)]


def test_prompt_logprobs_read_the_whole_prompt():
    subject = scheduler()
    subject.add(sequence(10, 1))
    run_to_end(subject)
    scored = sequence(10, 1, prompt_logprobs=0)
    subject.add(scored)

    assert work(subject.schedule()) == [(scored, 0, 10)]


def test_without_prefix_cache_nothing_is_shared():
    subject = scheduler(prefix_cache=False)
    subject.add(sequence(10, 1))
    run_to_end(subject)

    assert subject.pool.num_cached == 0


def test_removing_frees_pages_at_once():
    subject = scheduler(num_pages=3, prefix_cache=False)
    running, waiting = sequence(8), sequence(8)
    subject.add(running)
    subject.add(waiting)
    run(subject, subject.schedule())

    subject.finish(running)
    subject.finish(waiting)

    subject.check()
    assert subject.pool.num_blank == 3
    assert not subject.has_work()


def test_an_end_token_and_the_length_finish():
    subject = scheduler()
    request = sequence(3, 2)
    subject.add(request)
    (first,) = subject.schedule().entries
    assert subject.advance(first)
    (second,) = subject.schedule().entries
    assert subject.advance(second)

    assert request.tokens[3:] == [UNKNOWN_TOKEN, UNKNOWN_TOKEN]
    assert subject.schedule().entries == ()
    assert subject.resolve(first, EOS) == "stop"
    assert subject.resolve(first, 5) is None
    assert subject.resolve(second, 6) == "length"
    assert request.tokens[3:] == [5, 6]


def test_a_request_for_no_tokens_only_reads_its_prompt():
    subject = scheduler()
    request = sequence(5, 0)
    subject.add(request)

    (entry,) = subject.schedule().entries

    assert not entry.is_sampled


class SchedulerMachine(RuleBasedStateMachine):
    """Random requests, aborts and end tokens on a pool that is too small for them."""

    @initialize(
        num_pages=st.integers(4, 12),
        page_tokens=st.integers(1, 5),
        max_running=st.integers(1, 6),
        budget=st.integers(6, 24),
        prefix_cache=st.booleans(),
        is_ahead=st.booleans(),
    )
    def start(self, num_pages, page_tokens, max_running, budget, prefix_cache, is_ahead):
        self.subject = scheduler(
            num_pages=num_pages,
            page_tokens=page_tokens,
            max_running_requests=max_running,
            limits=StepLimits.plain(budget),
            prefix_cache=prefix_cache,
        )
        self.capacity = num_pages * page_tokens
        self.live: list[Sequence] = []
        self.is_ahead = is_ahead
        self.launched = []
        self.last_oldest = None

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20), more=st.integers(0, 12))
    def add(self, prompt, more):
        prompt = prompt[: self.capacity]
        request = sequence(prompt, min(more, self.capacity - len(prompt)))
        self.subject.add(request)
        self.live.append(request)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data):
        victim = data.draw(st.sampled_from(self.live))
        self.subject.finish(victim)
        self.live.remove(victim)

    @rule(token=st.sampled_from([0, 1, EOS]))
    def step(self, token):
        batch = self.subject.schedule()
        # All that live may be waiting for their last token.
        assert bool(batch.entries) == bool(self.live) or self.launched
        assert batch.num_tokens <= self.subject.max_batch_tokens
        for entry in batch.entries:
            assert entry.num_tokens >= 1
            assert len(entry.sequence.pages) * self.subject.page_tokens >= entry.end
        launched = [
            (entry, self.subject.advance(entry), entry.sequence.num_preemptions)
            for entry in batch.entries
        ]
        self.commit(token)
        self.launched = launched
        if not self.is_ahead:
            self.commit(token)

    def commit(self, token):
        """What the engine does with results, a step late when it keeps ahead."""
        launched, self.launched = self.launched, []
        for entry, is_sampled, num_preemptions in launched:
            sequence = entry.sequence
            if sequence not in self.live:
                continue
            if num_preemptions == sequence.num_preemptions:
                self.subject.register(entry)
            if is_sampled:
                is_over = self.subject.resolve(entry, token) is not None
            else:
                is_over = entry.end >= sequence.max_total_tokens
            if is_over:
                self.subject.finish(sequence)
                self.live.remove(sequence)

    @rule()
    def finish_everything(self):
        for _ in range(1000):
            if not self.live:
                break
            self.step(7)
        self.commit(7)
        assert self.live == []
        assert not self.subject.has_work()
        assert self.subject.pool.num_held == 0

    @invariant()
    def is_sound(self):
        if hasattr(self, "subject"):
            self.subject.check()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=150, stateful_step_count=40)
