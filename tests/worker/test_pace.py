from deepseek_worker.pace import MAX_SECONDS, Pace


def test_without_experience_clients_come_back_soon() -> None:
    assert Pace().seconds_until_free(100) == 1


def test_the_wait_grows_with_the_queue_and_the_time_each_request_takes() -> None:
    pace = Pace()
    for now in (10.0, 10.5, 11.0, 11.5):
        pace.request_ended(now)

    assert [pace.seconds_until_free(waiting) for waiting in (0, 1, 10, 10**6)] == [
        1, 1, 5, MAX_SECONDS,
    ]  # fmt: skip


def test_the_newest_pace_counts_but_one_pause_does_not_decide() -> None:
    pace = Pace()
    for now in (0.0, 1.0, 2.0, 12.0):
        pace.request_ended(now)

    assert pace.seconds_until_free(10) == 19
