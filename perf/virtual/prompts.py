"""Token ids for prompts of which only the length is known.

Owns which prompts begin alike. Invariants: no two prompts share a block unless their requests say
so; a turn of a conversation begins with exactly what its earlier turns asked and were answered
(every token of an answer is 0 in virtual time).
"""

from __future__ import annotations

from perf.virtual.values import SimRequest

ANSWER_TOKEN = 0


class PromptTokens:
    """Makes prompts, one after the other in order of arrival."""

    def __init__(self) -> None:
        self._said: dict[int, tuple[int, ...]] = {}

    def token_ids(self, handle: int, request: SimRequest) -> tuple[int, ...]:
        """The prompt of `request`; its own part consists of `handle`, which nobody else may have.

        Raises ValueError if it repeats more of its conversation than was said, or shares more than
        it has.
        """
        num_history, num_own = request.num_history_tokens, request.num_prompt_tokens
        if not num_history:
            if request.num_shared_tokens > num_own:
                raise ValueError(f"num_shared_tokens exceeds the prompt: {request}")
            shared = (0,) * request.num_shared_tokens
            prompt = shared + (handle,) * (num_own - request.num_shared_tokens)
        else:
            conversation = request.conversation
            said = () if conversation is None else self._said.get(conversation, ())
            if num_history > min(len(said), num_own):
                raise ValueError(
                    f"num_history_tokens exceeds what was said ({len(said)}): {request}"
                )
            prompt = said[:num_history] + (handle,) * (num_own - num_history)
        if request.conversation is not None:
            self._said[request.conversation] = prompt + (ANSWER_TOKEN,) * request.max_tokens
        return prompt
