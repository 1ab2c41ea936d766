"""Everything about a score-against-budget run that is decided before it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvprobe import tasks
from kvprobe.errors import EvictionError, TaskError, quote
from kvprobe.eviction import Policy, entries, policy
from kvprobe.eviction.compose import settings_of
from kvprobe.eviction.policies import ratio
from kvprobe.inputs import words
from kvprobe.tasks.items import Item

SETTINGS = ("context", "joint")
POLICIES = ("snapkv", "snapkv+two_stage", "adakv", "adakv+two_stage", "streaming", "random")
CACHES = ("0.1", "0.2", "0.3", "0.4", "0.5", "0.6")


@dataclass(frozen=True)
class Settings:
    """Everything that is decided before a run, and stored with it.

    Attributes
    ----------
    task, length, seed, options
        See :func:`kvprobe.tasks.make`; item i is made with seed ``seed · 10000 + i``.
    items
        Number of items.
    policies
        Eviction policies, at least one.
    caches
        Shares of the cache to keep, as they were written: they are read exactly.
    setting
        ``"context"``: the question is unseen when the context is compressed; ``"joint"``: both are compressed together,
        the easy setting.
    chunk
        None: the context is prefilled exactly, then evicted. A number: evicted after every so many tokens.
    new_tokens
        Tokens decoded greedily; None: the gold answer's length + 8.
    profile
        The file of a head profile that policies use, which must be one of the model that runs; None asks nothing.
    """

    policies: tuple[Policy, ...]
    caches: tuple[str, ...] = CACHES
    task: str = "niah_single_1"
    length: int = 1500
    items: int = 10
    seed: int = 0
    setting: str = "context"
    chunk: int | None = None
    new_tokens: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    profile: str | None = None

    def __post_init__(self) -> None:
        if self.task not in tasks.names():
            raise TaskError(f"no task {self.task!r}, must be one of {', '.join(tasks.names())}")
        if self.setting not in SETTINGS:
            raise TaskError(f"setting is {self.setting!r}, must be one of {', '.join(SETTINGS)}")
        _counts(self)
        if not self.policies or not self.caches:
            raise EvictionError("no policy or no cache ratio was given; allowed: one or more of each")
        for each in self.policies:
            if not isinstance(each, Policy):
                raise EvictionError(f"{quote(each)} is no policy; allowed: what kvprobe.eviction.policy(…) returns")
        for cache in self.caches:
            entries(1, cache)
        _once("policy", self.names, self.names)
        _once("cache ratio", self.caches, [ratio(cache) for cache in self.caches])

    @property
    def names(self) -> list[str]:
        """Names of the policies, in order."""
        return [policy.name for policy in self.policies]

    @property
    def semantics(self) -> str:
        """What happens when, in words."""
        what = "question and answer tokens" if self.setting == "context" else "answer tokens"
        if self.chunk is None:
            return f"prefill-then-evict: the compressed part is prefilled exactly, {what} see what is left"
        return (
            f"chunked({self.chunk}): evicted after every {self.chunk} tokens, later chunks and {what} see what is left"
        )

    def item(self, model: Any, index: int) -> Item:
        """Make item ``index`` of this run."""
        options = {"decoys": 0, "distractors": 0} | self.options
        return tasks.make(self.task, model, length=self.length, seed=self.seed * 10_000 + index, **options)


def _counts(settings: Settings) -> None:
    for name in ("chunk", "new_tokens"):
        value = getattr(settings, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise TaskError(f"{name} is {quote(value)}, must be a whole number of at least 1, or None")


def _once(kind: str, given: Sequence[str], values: Sequence[Any]) -> None:
    """Refuse the same policy or size twice, however it is written: rows would be one."""
    for place, value in enumerate(values):
        if value in values[:place]:
            first = given[values.index(value)]
            both = first if str(first) == str(given[place]) else f"{first} = {given[place]}"
            raise EvictionError(f"{kind} {both} is given twice; allowed: each once")


FLAGS = {"importance": ("headkv", "--profile FILE"), "gates": ("duo", "--gates FILE or --profile FILE")}


def from_command(given: Mapping[str, Any]) -> Settings:
    """Settings from the words of ``kvprobe evict``."""
    names = words(given["policies"])
    own = {name: _own(name) for name in names}
    parts = {name: given[name] for name in ("alpha", "epsilon", "preset") if given[name] is not None}
    parts |= _heads(given, own)
    _used(parts, own)
    policies = tuple(_policy(name, parts, own[name], given["seed"]) for name in names)
    options = {"template": given["template"]}
    if given["haystack"] is not None:
        options["path"] = str(given["haystack"])
    plain = {name: given[name] for name in ("task", "length", "items", "seed", "setting", "chunk", "new_tokens")}
    profile = None if given["profile"] is None else str(given["profile"])
    return Settings(policies, words(given["cache"]), **plain, options=options, profile=profile)


def _heads(given: Mapping[str, Any], own: Mapping[str, set[str]]) -> dict[str, str]:
    """What policies learn about heads: importance from the profile; gates from their table, or the profile too."""
    profile, gates = (None if given[name] is None else str(given[name]) for name in ("profile", "gates"))
    wanted = {key for each in own.values() for key in each}
    from_profile = gates is None and "gates" in wanted
    found = {"importance": None if from_profile and "importance" not in wanted else profile}
    found["gates"] = profile if from_profile else gates
    return {name: path for name, path in found.items() if path is not None}


def _own(name: str) -> set[str]:
    """What the command can set of a policy: ``epsilon`` is stage 2's alone, ``preset`` needs a pooling to choose."""
    has = settings_of(name)
    stage2, pools = {"alpha", "epsilon"} <= has, {"pool", "kernel"} <= has
    return (has & {"alpha", *FLAGS}) | ({"epsilon"} if stage2 else set()) | ({"preset"} if pools else set())


def _policy(name: str, parts: Mapping[str, Any], own: set[str], seed: int) -> Policy:
    """One policy with those of the given settings that it has."""
    for needed, (method, flag) in FLAGS.items():
        if needed in own and needed not in parts:
            raise EvictionError(f"{name} needs to know its heads; allowed: {method} with {flag}")
    return policy(name, seed=seed, **{key: value for key, value in parts.items() if key in own})


def _used(parts: Mapping[str, Any], own: Mapping[str, set[str]]) -> None:
    """Refuse a setting that no policy of the list has."""
    unused = sorted(set(parts) - {key for each in own.values() for key in each})
    if own and unused:
        flag = {"importance": "profile"}.get(unused[0], unused[0])
        raise EvictionError(f"none of {', '.join(own)} has the setting {flag}; allowed: with a policy that has it")
