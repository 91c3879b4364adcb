"""What a chat template says about thoughts and tools."""

import pytest

from deepseek_worker.chat_format import CALL_BEGIN, CALL_END, CALLS_BEGIN, SEPARATOR, ChatFormat

# The lines that matter of the templates that come with the models.
R1 = (
    "{% if message['role'] == 'assistant' and 'tool_calls' in message %}"
    "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + "
    "tool['function']['name'] + '\\n' + '```json' + '\\n' + tool['function']['arguments'] + '\\n'"
    " + "
    "'```' + '<｜tool▁call▁end｜>'}}{% if '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}{{'<｜Assistant｜><think>\\n'}}"
)
V31 = (
    "{% if thinking %}{{'<think>'}}{% else %}{{'</think>'}}{% endif %}{% if tools %}{% endif %}"
    "{{'<｜tool▁call▁begin｜>'+ tool['function']['name'] + '<｜tool▁sep｜>' + "
    "tool['function']['arguments']}}{% if message['tool_calls'] %}"
)
PLAIN = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
TOOL = {"function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}


def test_templates_tell_what_their_models_do() -> None:
    assert ChatFormat.of(R1) == ChatFormat("v3", True, False, True)
    assert ChatFormat.of(V31) == ChatFormat("v3.1", True, True, True)
    assert ChatFormat.of(PLAIN) == ChatFormat("v3", False, False, False)
    assert ChatFormat.of("") == ChatFormat("v3", False, False, False)


@pytest.mark.parametrize(
    ("template", "prompt", "continued", "start"),
    [
        (R1, "<｜Assistant｜><think>\n", None, "thought"),
        (R1, "<｜User｜>what is <think>?<｜Assistant｜>", None, "either"),
        (V31, "<｜Assistant｜></think>", None, "answer"),
        (V31, "<｜Assistant｜><think>", None, "thought"),
        (R1, "<｜Assistant｜><think>\nso", "<think>\nso", "thought"),
        (R1, "<｜Assistant｜>Yes, ", "Yes, ", "answer"),
        (R1, "<think>a</think>b", "<think>a</think>b", "answer"),
        (PLAIN, "<think>", None, "answer"),
    ],
)
def test_an_answer_begins_where_its_prompt_ends(
    template: str, prompt: str, continued: str | None, start: str
) -> None:
    assert ChatFormat.of(template).start_of(prompt, continued) == start


def test_a_model_is_told_of_its_tools_before_everything_else() -> None:
    user = {"role": "user", "content": "Where?"}
    chat_format = ChatFormat.of(R1)

    added, same = chat_format.with_tools([user], [TOOL])
    extended, _ = chat_format.with_tools([{"role": "system", "content": "Be kind."}, user], [TOOL])

    assert same == user
    assert added["role"] == extended["role"] == "system"
    assert '### look\nDescription: Looks.\n\nParameters: {"type": "object"}' in added["content"]
    assert f"{CALLS_BEGIN}{CALL_BEGIN}function{SEPARATOR}NAME\n```json\n" in added["content"]
    assert extended["content"] == f"Be kind.\n\n{added['content']}"


def test_calls_of_earlier_turns_become_text_where_the_template_knows_none() -> None:
    call = {"function": {"name": "look", "arguments": '{"at": 1}'}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    other = {"role": "user", "content": "x"}

    written, same = ChatFormat.of(PLAIN).with_calls([turn, other])

    assert same == other
    assert written.keys() == {"role", "content"}
    assert f'{SEPARATOR}look\n```json\n{{"at": 1}}\n```{CALL_END}' in written["content"]


def test_a_text_and_its_calls_part_where_the_template_would_lose_one() -> None:
    template = "{% if message['content'] is none %}{% for tool in message['tool_calls'] %}"
    call = {"function": {"name": "look", "arguments": "{}"}}
    turn = {"role": "assistant", "content": "I look.", "tool_calls": [call]}

    text, calls = ChatFormat.of(template).with_calls([turn])

    assert text == {"role": "assistant", "content": "I look."}
    assert calls == {"role": "assistant", "content": None, "tool_calls": [call]}
    assert ChatFormat.of(V31).with_calls([turn]) == [turn]


def test_a_call_is_written_in_the_model_s_own_form() -> None:
    assert ChatFormat.of(V31).written_call("f", "{}") == f"{CALL_BEGIN}f{SEPARATOR}{{}}{CALL_END}"
