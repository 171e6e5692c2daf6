"""A format for thoughts and one for calls, put together into one machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from canter.text.parsing.call_tags import CallWriting
from canter.text.parsing.emitter import Emitter, random_id
from canter.text.parsing.format import CONTENT, REASONING, Calls, Rule, State, Thoughts
from canter.text.parsing.json_choice import START, choice_rules, choice_states
from canter.text.parsing.machine import Machine, Table, make_table
from canter.text.parsing.options import ParseOptions
from canter.text.parsing.scanner import make_scanner
from canter.text.tokenizer import Tokenizer

_MAX_SCAN = 65536
"""Tokens at the prompt's end that are looked at for an open thought (a thought that the answer is to go on with may be long)."""

PromptState = Literal["open", "closed", "silent", "unknown"]


class ComposedFormat:
    """An `OutputFormat`. `calls` or `thoughts` None: the output holds none that the format would know."""

    def __init__(self, tokenizer: Tokenizer, calls: Calls | None, thoughts: Thoughts | None, description: str) -> None:
        self._tokenizer, self._calls, self._thoughts, self._description = tokenizer, calls, thoughts, description
        self._only_thoughts: ComposedFormat | None = None
        self._tables: dict[tuple[bool, bool, str, bool], Table] = {}

    @property
    def description(self) -> str:
        return self._description

    @property
    def reads_tools(self) -> bool:
        return self._calls is not None

    @property
    def reads_thoughts(self) -> bool:
        return self._thoughts is not None

    @property
    def written_calls(self) -> CallWriting | None:
        """How the model is held to the schemas of functions, where the format knows."""
        return self._calls.written if self._calls is not None else None

    def without_calls(self) -> ComposedFormat:
        """See `canter.text.parsing.parser.OutputFormat`."""
        if self._calls is None:
            return self
        if self._only_thoughts is None:
            self._only_thoughts = ComposedFormat(self._tokenizer, None, self._thoughts, self._description)
        return self._only_thoughts

    def parser(self, options: ParseOptions, prompt_token_ids: Sequence[int] = (), prompt_tail: str = "") -> Machine:
        """A parser of one output. See `canter.text.parsing.parser.OutputFormat`."""
        prompt = self._prompt_state(prompt_token_ids, prompt_tail)
        thinks = self._thoughts is not None and (prompt == "open" or self._thoughts.enabled(options))
        content = self._content_state(options)
        starts_in_thought = thinks and self._starts_in_thought(options, prompt)
        table = self._table(options, thinks)
        scanner = make_scanner(self._tokenizer, table.anchors, prompt_token_ids)
        new_id = self._calls.new_id if self._calls is not None else random_id
        frames = frozenset(marker for part in self._parts() for marker in part.frames)
        emitter = Emitter(options, new_id, frames=frames)
        if self._thoughts is not None:
            answers = self._thoughts.answers is not None and self._thoughts.answers(options)
            emitter = Emitter(options, new_id, self._thoughts.trims_end, answers, frames)
            emitter.content(self._thoughts.prefix)
        return Machine(table, REASONING if starts_in_thought else self._first_state(content), content, emitter, scanner)

    def _parts(self) -> list[Calls | Thoughts]:
        return [part for part in (self._calls, self._thoughts) if part is not None]

    def _initial_states(self) -> list[str]:
        return [part.initial for part in self._parts() if part.initial != CONTENT]

    def _is_content(self, name: str) -> bool:
        return any(name in part.states and part.states[name].kind == "content" for part in self._parts())

    def _content_state(self, options: ParseOptions) -> str:
        """The state in which content begins."""
        if options.tool_choice in ("required", "named"):
            return START
        initial = next(filter(self._is_content, self._initial_states()), CONTENT)
        unwanted = self._calls is not None and initial == self._calls.initial and options.tool_choice == "none"
        return CONTENT if unwanted else initial

    def _first_state(self, content: str) -> str:
        """The state in which an output begins that isn't in a thought: a header, where a format has such, else the content."""
        return next((name for name in self._initial_states() if not self._is_content(name)), content)

    def _table(self, options: ParseOptions, thinks: bool) -> Table:
        choice = options.tool_choice if options.tool_choice in ("required", "named") else ""
        key = (thinks, options.tool_choice != "none", choice, options.keep_special_tokens)
        if key not in self._tables:
            self._tables[key] = self._make_table(options, thinks)
        return self._tables[key]

    def _make_table(self, options: ParseOptions, thinks: bool) -> Table:
        content = self._content_state(options)
        states = {CONTENT: State("content"), REASONING: State("reasoning")}
        rules: list[Rule] = []
        if options.tool_choice in ("required", "named"):
            states |= choice_states(options)
            rules += choice_rules(options)
        if self._calls is not None:
            states |= self._calls.states
            rules += [rule for rule in self._calls.rules if not rule.needs_calls or options.tool_choice != "none"]
        if thinks and self._thoughts is not None:
            states |= self._thoughts.all_states(content)
            rules += self._thoughts.all_rules(content)
        rules = [replace(rule, target=content) if (rule.sources, rule.target) == (REASONING, CONTENT) else rule for rule in rules]
        for name, state in states.items():
            if state.on_text is not None and states[state.on_text].kind in ("content", "reasoning"):
                rules += _inherited(rules, name, state.on_text)
        return make_table(states, rules, self._ids(rules), {} if options.keep_special_tokens else self._hidden())

    def _ids(self, rules: Sequence[Rule]) -> dict[str, int]:
        """The literals that are tokens of their own."""
        found = {literal: self._tokenizer.token_to_id(literal) for literal in {rule.literal for rule in rules}}
        return {lit: token_id for lit, token_id in found.items() if token_id is not None and token_id in self._tokenizer.added_token_ids}

    def _hidden(self) -> dict[int, str]:
        preserved = self._calls.preserved if self._calls is not None else ()
        texts = {token_id: self._tokenizer.id_to_token(token_id) or "" for token_id in self._tokenizer.special_token_ids}
        return {token_id: text for token_id, text in texts.items() if text not in preserved}

    def _starts_in_thought(self, options: ParseOptions, prompt: PromptState) -> bool:
        if prompt in ("open", "closed") or self._thoughts is None:
            return prompt == "open"
        return self._thoughts.opens(options) and not (prompt == "silent" and self._thoughts.needs_opening)

    def _prompt_state(self, token_ids: Sequence[int], tail: str) -> PromptState:
        """What the prompt's end says: the last marker of a thought, as far as the turn that the output continues reaches."""
        if self._thoughts is None or not (token_ids or tail):
            return "unknown"
        starts, ends = (self._marker_ids(markers) for markers in (self._thoughts.starts, self._thoughts.ends))
        if token_ids and starts and ends:
            special = self._tokenizer.special_token_ids
            for token_id in reversed(token_ids[-_MAX_SCAN:]):
                if token_id in starts or token_id in ends:
                    return "open" if token_id in starts else "closed"
                if token_id in special:
                    break
            return "silent"
        tail = tail or self._tokenizer.decode(token_ids[-256:], skip_special_tokens=False)
        start = max((tail.rfind(marker) for marker in self._thoughts.starts), default=-1)
        end = max((tail.rfind(marker) + len(marker) if marker in tail else -1 for marker in self._thoughts.ends), default=-1)
        if start > end:
            return "open"
        return "closed" if end >= 0 and not tail[end:].strip() else "silent"

    def _marker_ids(self, markers: Sequence[str]) -> frozenset[int]:
        found = (self._tokenizer.token_to_id(marker) for marker in markers)
        return frozenset(token_id for token_id in found if token_id is not None and token_id in self._tokenizer.added_token_ids)


def _inherited(rules: Sequence[Rule], name: str, parent: str) -> list[Rule]:
    """A state that text may leave for another knows that one's markers, as far as it gives them no meaning of its own."""
    return [replace(rule, sources=name) for rule in rules if parent in rule.sources.split()]
