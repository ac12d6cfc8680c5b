"""Messages to tokens and back: the splice is what the family's own code gives, or what the whole template gives."""

from __future__ import annotations

import copy
import json
import logging
import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from conversations import (
    ARGUMENTS,
    LOOK,
    NAME,
    PLAIN,
    TEXT,
    TOOLS,
    assistant,
    next_messages,
    openings,
    replies,
    reply_texts,
    result,
    system,
    user,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from renderers import create_renderer
from renderers.configs import Llama3RendererConfig, Qwen3RendererConfig

from longrein.contract import LongreinError, Message
from longrein.rendering import FamilyRendering, Rendering, TemplateRendering, rendering_for
from longrein.rendering.family import families as known_families

Named = Callable[[str], Any]
FAMILIES = {"qwen3": "qwen3", "tiny": "qwen3", "llama3_2": "llama-3"}
TEMPLATES = ["qwen2_5", "smollm2", "mistral_nemo"]
EVERY = [*FAMILIES, *TEMPLATES]


def families(test: Any) -> Any:
    return pytest.mark.parametrize("name", FAMILIES)(test)


def library(tokenizer: Any, name: str) -> Any:
    """The family's own renderer, that splices with the real conversation before it."""
    config = Llama3RendererConfig if name == "llama3_2" else Qwen3RendererConfig
    return create_renderer(tokenizer, config(thinking_retention="all"))


# Which rendering a tokenizer gets


@families
def test_a_tokenizer_of_a_known_family_gets_the_family(name: str, rendering: Named) -> None:
    found = rendering(name)
    assert isinstance(found, FamilyRendering)
    assert (found.name, found.keeps_prefixes) == (FAMILIES[name], True)


@pytest.mark.parametrize("name", TEMPLATES)
def test_any_other_tokenizer_gets_its_template(name: str, rendering: Named) -> None:
    found = rendering(name)
    assert isinstance(found, TemplateRendering)
    assert (found.name, found.keeps_prefixes) == ("template", True)


def test_what_mistral_does_not_keep_is_said_at_the_start(tokenizer: Named, caplog: pytest.LogCaptureFixture) -> None:
    found = rendering_for(tokenizer("mistral_nemo"))
    assert "does not keep prefixes with a system message or with tools" in caplog.text
    reply, new = assistant("two"), [user("three")]
    assert found.extension(reply, new) is not None
    assert found.extension(reply, new, [LOOK]) is None  # its template moves the tools to the last user message
    assert found.extension(reply, new, system=[system("be brief")]) is None  # and the system message too


@families
def test_a_long_text_is_folded_and_comes_out_token_for_token(name: str, rendering: Named, tokenizer: Named) -> None:
    found, own = rendering(name), library(tokenizer(name), name)
    assert found._writer is not found._parser
    long = "Read this, please:\n" + "a room,  and\tanother <b>room</b> \n" * 40
    messages = [system(long), user(long)]
    prompt = own.render_ids(messages, tools=[LOOK], add_generation_prompt=True)
    assert found.prompt(messages, [LOOK]) == prompt
    for new in ([user(long)], [result(long, "call_0")], [result(long, "call_0"), user(long)]):
        reply = found.encode_reply(assistant("", ("look", {}))) if "tool" in new[0]["role"] else found.encode_reply("yes")
        spliced = own.bridge_to_next_turn(prompt, reply, new, tools=[LOOK]).token_ids[len(prompt) + len(reply) :]
        assert found.extension(found.parse(reply), new, [LOOK], stop_id=reply[-1]) == list(spliced)


def test_a_family_that_looks_into_the_tokens_of_a_text_is_given_them(
    rendering: Named, tokenizer: Named, monkeypatch: pytest.MonkeyPatch
) -> None:
    from renderers.qwen3 import Qwen3Renderer

    def positive(renderer: Any, *args: Any, **kwargs: Any) -> list[int]:
        ids = Qwen3Renderer.render(renderer, *args, **kwargs).token_ids
        return [token for token in ids if token >= 0]

    messages = [user("a long text " * 100)]
    expected = rendering("qwen3").prompt(messages)
    monkeypatch.setattr(Qwen3Renderer, "render_ids", positive)
    found = FamilyRendering(tokenizer("qwen3"), "qwen3")
    assert found._writer is found._parser
    assert found.prompt(messages) == expected


@pytest.mark.parametrize("name", ["qwen2_5", "smollm2"])
def test_a_template_that_keeps_prefixes_goes_without_saying(
    name: str, tokenizer: Named, caplog: pytest.LogCaptureFixture
) -> None:
    rendering_for(tokenizer(name))
    assert caplog.text == ""


CHATML = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
END = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages[-2:] %}" + CHATML + "{% endfor %}" + END,
        "{{ messages | length }}{% for m in messages %}" + CHATML + "{% endfor %}" + END,
        "{% for m in messages %}{% if m.role == 'user' %}{{ loop.index }}{% endif %}" + CHATML + "{% endfor %}" + END,
        "{% for m in messages %}{% if m.role == 'user' or loop.last %}" + CHATML + "{% endif %}{% endfor %}" + END,
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}{{ 'assistant: ' }}",
        "{% for m in messages %}" + CHATML + "{% endfor %}" + END + "{% if add_generation_prompt %}<think>\n{% endif %}",
    ],
    ids=["window", "count", "numbered", "drops-replies", "no-close", "opens-reasoning"],
)
def test_a_template_that_keeps_no_prefixes_is_found_at_the_start_and_said(
    template: str, tokenizer: Named, caplog: pytest.LogCaptureFixture
) -> None:
    changed = copy.deepcopy(tokenizer("qwen2_5"))
    changed.chat_template = template
    with caplog.at_level(logging.WARNING):
        found = rendering_for(changed)
    assert not found.keeps_prefixes
    assert "does not keep prefixes:" in caplog.text
    assert found.extension(assistant("two"), [user("three")]) is None
    assert found.stop_ids == {changed.eos_token_id}


def test_a_tokenizer_without_a_chat_template_is_refused(tokenizer: Named) -> None:
    bare = copy.deepcopy(tokenizer("qwen3"))
    bare.chat_template = None
    with pytest.raises(LongreinError, match=r"has no chat template\. Use an instruct model"):
        rendering_for(bare)
    assert rendering_for(bare, "qwen3").prompt([user("hi")]) == rendering_for(tokenizer("qwen3")).prompt([user("hi")])


@pytest.mark.parametrize("unknown", ["qwen-3", "default", "auto"])
def test_an_unknown_renderer_is_refused_with_the_known_ones(unknown: str, tokenizer: Named) -> None:
    with pytest.raises(LongreinError, match=f"no renderer '{unknown}'; known: qwen3, "):
        rendering_for(tokenizer("qwen3"), unknown)


def test_a_renderer_that_does_not_fit_is_refused(tokenizer: Named) -> None:
    with pytest.raises(LongreinError, match=r"'llama-3' does not fit: .*<\|begin_of_text\|>"):
        rendering_for(tokenizer("qwen3"), "llama-3")
    with pytest.raises(LongreinError, match=r"'qwen3' does not fit: .*\n*enable_thinkin"):
        rendering_for(tokenizer("qwen3"), enable_thinkin=False)


# The splice


@pytest.mark.parametrize("name", EVERY)
def test_a_closed_reply_needs_no_close(name: str, rendering: Named) -> None:
    found = rendering(name)
    for stop in found.stop_ids:
        assert found.close(found.prompt([user("hi")]), [stop]) == []


@families
@settings(max_examples=150)
@given(data=st.data())
def test_close_and_extension_are_what_the_family_puts_after_the_real_conversation(
    name: str, rendering: Named, tokenizer: Named, data: st.DataObject
) -> None:
    found, vocabulary = rendering(name), len(tokenizer(name))
    tools = data.draw(TOOLS)
    prompt = found.prompt(data.draw(openings()), tools)
    drawn = data.draw(replies(name, found, vocabulary))
    new = data.draw(next_messages())
    stop = drawn[-1] if drawn[-1] in found.stop_ids else None
    ours = found.extension(found.parse(drawn, prompt, tools), new, tools, stop_id=stop)
    assert ours is not None
    spliced = [*prompt, *drawn, *found.close(prompt, drawn), *ours]
    theirs = library(tokenizer(name), name).bridge_to_next_turn(prompt, drawn, new, tools=tools or None)
    if theirs is not None:
        assert spliced == list(theirs.token_ids)
    else:  # reasoning that a sampled stop left open: the library would render again, we keep the tokens
        assert stop is not None
        assert "</think>" not in found.decode(drawn)


@settings(max_examples=60)
@given(opening=openings(), text=PLAIN, new=st.lists(TEXT.map(user) | TEXT.map(result), min_size=1, max_size=3), tools=TOOLS)
@pytest.mark.parametrize("name", ["qwen2_5", "smollm2"])
def test_a_spliced_template_reads_like_the_whole_one(
    name: str, rendering: Named, opening: list[Message], text: str, new: list[Message], tools: list[Any]
) -> None:
    reply = assistant(text)
    assert_spliced_reads_like_whole(rendering(name), opening, reply, new, tools)


@settings(max_examples=60)
@given(opening=openings(), text=PLAIN, calls=st.lists(st.tuples(NAME, ARGUMENTS), min_size=1, max_size=3), last=TEXT)
def test_a_spliced_template_with_tool_calls_reads_like_the_whole_one(
    rendering: Named, opening: list[Message], text: str, calls: list[Any], last: str
) -> None:
    new = [result(f"found {index}", f"callabc{index:02}") for index in range(len(calls))]
    assert_spliced_reads_like_whole(rendering("qwen2_5"), opening, assistant(text, *calls), [*new, user(last)], [LOOK])


@settings(max_examples=30)
@given(first=PLAIN, text=PLAIN, second=PLAIN)
def test_mistral_without_tools_and_system_reads_like_the_whole_one(
    rendering: Named, first: str, text: str, second: str
) -> None:
    assert_spliced_reads_like_whole(rendering("mistral_nemo"), [user(first)], assistant(text), [user(second)], [])


def assert_spliced_reads_like_whole(
    found: Rendering, opening: list[Message], reply: Message, new: list[Message], tools: list[Any]
) -> None:
    extension = found.extension(reply, new, tools, system=[m for m in opening if m["role"] == "system"])
    assert extension is not None
    spliced = [*found.prompt(opening, tools), *found.encode_reply(reply), *extension]
    assert found.decode(spliced) == found.decode(found.prompt([*opening, reply, *new], tools))


def test_a_truncated_reply_is_closed(rendering: Named) -> None:
    for name, close in (
        ("qwen3", "<|im_end|>"),
        ("llama3_2", "<|eot_id|>"),
        ("qwen2_5", "<|im_end|>"),
        ("mistral_nemo", "</s>"),
    ):
        found = rendering(name)
        cut = found.encode_reply("it is")[:-1]
        assert found.decode(found.close(found.prompt([user("hi")]), cut)) == close


def test_a_reply_that_was_cut_before_its_first_token_is_closed(rendering: Named) -> None:
    for name in ("qwen3", "llama3_2", "qwen2_5"):
        found = rendering(name)
        assert len(found.close(found.prompt([user("hi")]), [])) == 1


def test_open_reasoning_is_closed_when_cut_and_kept_when_stopped(rendering: Named) -> None:
    found = rendering("qwen3")
    prompt, new = found.prompt([user("hi")]), [user("go on")]
    stopped = found.encode_reply("<think>\nhm, let me")
    cut = stopped[:-1]
    assert found.decode(found.close(prompt, cut)) == "</think><|im_end|>"
    assert found.close(prompt, stopped) == []
    follows = "\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    for drawn in (cut, stopped):
        reply = found.parse(drawn, prompt)
        assert reply == {"role": "assistant", "content": "", "reasoning_content": "\nhm, let me"}
        assert found.decode(found.extension(reply, new)) == follows


def test_an_assistant_turn_the_model_never_wrote_is_not_spliced_by_a_family(rendering: Named) -> None:
    new = [assistant("I was not sampled"), user("really?")]
    for name in ("qwen3", "llama3_2"):
        assert rendering(name).extension(assistant("yes"), new) is None
    assert_spliced_reads_like_whole(rendering("qwen2_5"), [user("hi")], assistant("yes"), new, [])


def test_text_and_parts_render_alike(rendering: Named) -> None:
    parts = user(
        [{"type": "text", "text": "one ", "cache_control": {"type": "ephemeral"}}, "two", {"type": "text", "text": None}]
    )
    for name in EVERY:
        assert rendering(name).prompt([parts]) == rendering(name).prompt([user("one two")])


def test_a_developer_message_is_a_system_message(rendering: Named) -> None:
    for name in EVERY:
        found = rendering(name)
        developer = {"role": "developer", "content": "be brief"}
        assert found.prompt([developer, user("hi")]) == found.prompt([system("be brief"), user("hi")])


def test_what_cannot_be_rendered_is_refused_in_words(rendering: Named) -> None:
    image = user([{"type": "image_url", "image_url": {"url": "data:"}}])
    with pytest.raises(LongreinError, match="content part of type 'image_url'; only text"):
        rendering("qwen3").prompt([image])
    with pytest.raises(LongreinError, match=r"'llama-3' refuses this conversation: .*single tool call"):
        rendering("llama3_2").prompt([user("hi"), assistant("", ("look", {}), ("look", {}))])
    with pytest.raises(LongreinError, match=r"template refuses this conversation: .*roles must alternate"):
        rendering("mistral_nemo").prompt([user("hi"), user("again")])


def test_without_thinking_the_prompt_closes_the_reasoning(tokenizer: Named) -> None:
    found = rendering_for(tokenizer("qwen3"), enable_thinking=False)
    assert isinstance(found, FamilyRendering)
    closed = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    prompt = found.prompt([user("hi")])
    assert found.decode(prompt).endswith(closed)
    drawn = found.encode_reply("yes")
    assert found.parse(drawn, prompt) == assistant("yes")
    assert found.encode_reply(assistant("yes")) == drawn
    extension = found.extension(assistant("yes"), [user("more")])
    assert extension is not None
    assert found.decode(extension) == f"\n<|im_start|>user\nmore<|im_end|>\n{closed}"
    assert [*prompt, *drawn, *extension] == found.prompt([user("hi"), assistant("yes"), user("more")])


# Replies


@pytest.mark.parametrize("name", ["qwen3", "tiny", "qwen2_5", "llama3_2", "mistral_nemo"])
@settings(max_examples=60)
@given(text=PLAIN, calls=st.lists(st.tuples(NAME, ARGUMENTS), max_size=3))
def test_a_message_written_and_parsed_is_the_same_message(
    name: str, rendering: Named, text: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    found = rendering(name)
    if name in ("llama3_2", "mistral_nemo") and calls:  # no words beside a call, and Llama has one at a time
        text, calls = "", calls[:1] if name == "llama3_2" else calls
    ids = found.encode_reply(assistant(text, *calls))
    assert ids[-1] in found.stop_ids
    parsed = found.parse(ids, found.prompt([user("hi")], [LOOK]), [LOOK])
    assert parsed["content"].strip() == unicodedata.normalize("NFC", text).strip()
    functions = [call["function"] for call in parsed.get("tool_calls", [])]
    assert [(f["name"], json.loads(f["arguments"])) for f in functions] == calls


@pytest.mark.parametrize("name", EVERY)
@settings(max_examples=100)
@given(data=st.data())
def test_any_ids_parse_into_a_message_a_program_can_read(
    name: str, rendering: Named, tokenizer: Named, data: st.DataObject
) -> None:
    found = rendering(name)
    beyond = len(tokenizer(name)) + 100  # a model's head is often wider than its vocabulary
    parsed = found.parse(data.draw(replies(name, found, beyond)), found.prompt([user("hi")]), [LOOK])
    assert parsed["role"] == "assistant"
    json.dumps(parsed, ensure_ascii=False, allow_nan=False).encode()
    for call in parsed.get("tool_calls", []):
        assert isinstance(json.loads(call["function"]["arguments"]), dict)
        assert isinstance(call["function"]["name"], str)


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "look", "arguments": {"room": }}',
        '{"name": "look", "arguments": {"room": NaN}}',
        '{"name": "look", "arguments": {"room": 1e999}}',
        '{"name": "look", "arguments": {"room": "\\ud800"}}',
        '{"name": "look", "arguments": ["kitchen"]}',
        '{"name": "look", "arguments": "kitchen"}',
        '{"name": {"look": 1}, "arguments": {}}',
        '{"name": "look\\ud800", "arguments": {}}',
        '{"name": "look", "arguments": {"room": ' + "[" * 33 + "]" * 33 + "}}",
        '{"arguments": {"room": "kitchen"}}',
        '["look"]',
        "look(kitchen)",
    ],
)
@pytest.mark.parametrize("name", ["qwen3", "qwen2_5", "tiny"])
def test_a_tool_call_a_program_could_not_read_stays_in_the_text(name: str, body: str, rendering: Named) -> None:
    found = rendering(name)
    written = f"<tool_call>\n{body}\n</tool_call>"
    sound = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    parsed = found.parse(found.encode_reply(f"Let me look.\n{written}\n{sound}"))
    assert parsed["content"].split() == f"Let me look.\n{written}".split()
    assert [call["function"] for call in parsed["tool_calls"]] == [{"name": "look", "arguments": "{}"}]


@pytest.mark.parametrize("body", ["[" * 3000, '{"name": "look", "arguments": {"n": ' + "7" * 5000 + "}}"])
@pytest.mark.parametrize("name", ["qwen3", "qwen2_5", "llama3_2"])
def test_json_too_deep_or_too_long_for_the_parser_stays_in_the_text(name: str, body: str, rendering: Named) -> None:
    found = rendering(name)
    text = body if name == "llama3_2" else f"<tool_call>\n{body}\n</tool_call>"
    parsed = found.parse(found.encode_reply(text))
    assert parsed == assistant(text)


MISTRAL_CALL = '{"name": "look", "arguments": {}, "id": "abcdefghi"}'


@pytest.mark.parametrize(
    ("written", "content", "ids"),
    [
        (f"[TOOL_CALLS][{MISTRAL_CALL}]", "", ["abcdefghi"]),
        (f"I look.[TOOL_CALLS][{MISTRAL_CALL}, {MISTRAL_CALL}]", "I look.", ["abcdefghi", "abcdefghi"]),
        ('[TOOL_CALLS][{"name": "look"}, {"name": 1}]', '{"name": 1}', [None]),
        ("[TOOL_CALLS][", "[TOOL_CALLS][", []),
        ("[TOOL_CALLS][1]", "[TOOL_CALLS][1]", []),
        ("[TOOL_CALLS]" + "[" * 3000, "[TOOL_CALLS]" + "[" * 3000, []),
        ("[TOOL_CALLS]look(attic)", "[TOOL_CALLS]look(attic)", []),
    ],
)
def test_what_mistral_calls_is_read(rendering: Named, written: str, content: str, ids: list[str | None]) -> None:
    parsed = rendering("mistral_nemo").parse(rendering("mistral_nemo").encode_reply(written))
    assert parsed["content"] == content
    assert [call.get("id") for call in parsed.get("tool_calls", [])] == ids


def test_a_template_without_a_place_for_tools_says_so_once(tokenizer: Named, caplog: pytest.LogCaptureFixture) -> None:
    found = rendering_for(tokenizer("smollm2"))
    assert found.prompt([user("hi")], [LOOK]) == found.prompt([user("hi")])
    assert caplog.text.count("has no place for tools") == 1
    found.prompt([user("hi")], [LOOK])
    assert caplog.text.count("has no place for tools") == 1


def test_arguments_written_as_a_string_of_json_are_arguments(rendering: Named) -> None:
    written = '<tool_call>{"name": "look", "arguments": "{\\"room\\": 1}"}</tool_call>'
    (call,) = rendering("qwen3").parse(rendering("qwen3").encode_reply(written))["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"room": 1}


def test_a_call_that_was_cut_stays_in_the_text(rendering: Named) -> None:
    found = rendering("qwen3")
    cut = found.encode_reply('<tool_call>\n{"name": "look", "argu')[:-1]
    assert found.parse(cut) == assistant('<tool_call>\n{"name": "look", "argu')


def test_a_reply_of_only_the_stop_is_empty(rendering: Named) -> None:
    for name in EVERY:
        found = rendering(name)
        for stop in found.stop_ids:
            assert found.parse([stop], found.prompt([user("hi")])) == assistant("")


@pytest.mark.parametrize("name", EVERY)
@given(data=st.data())
def test_a_written_reply_ends_at_its_first_stop(name: str, rendering: Named, data: st.DataObject) -> None:
    found = rendering(name)
    ids = found.encode_reply(data.draw(reply_texts(name)))
    assert [token in found.stop_ids for token in ids] == [False] * (len(ids) - 1) + [True]


# Every family of the library, over a vocabulary that has whatever special tokens it asks for


@pytest.mark.parametrize("family", [name for name in known_families() if name != "gpt-oss"])  # it downloads its vocabulary
def test_every_family_is_spliced_as_its_own_code_would(family: str, growing: Any) -> None:
    found = FamilyRendering(growing, family)
    prompt = found.prompt([system("be brief"), user("one")], [LOOK])
    turns = [
        (assistant("sure"), [user("next")]),
        (assistant("", ("look", {"room": "é 1"})), [result("dark")]),
        (assistant("", ("look", {"room": "é 1"})), [result("dark"), user("next")]),
    ]
    for reply, new in turns:
        body = found.encode_reply(reply)[:-1]
        for ending in [[], *([stop] for stop in found.stop_ids)]:
            drawn = [*body, *ending]
            extension = found.extension(reply, new, [LOOK], stop_id=ending[0] if ending else None)
            ours = None if extension is None else [*prompt, *drawn, *found.close(prompt, drawn), *extension]
            named = [{**m, "name": "look"} if m["role"] == "tool" else m for m in new]
            theirs = found._parser.bridge_to_next_turn(prompt, drawn, named, tools=[LOOK])
            assert ours == (None if theirs is None else list(theirs.token_ids))
