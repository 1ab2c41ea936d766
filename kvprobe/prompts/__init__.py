"""Prompts: token ids with named, exact token spans, under one policy for BOS and chat templates.

* :mod:`kvprobe.prompts.prompt`: :class:`Prompt`, from text or from ids;
* :mod:`kvprobe.prompts.batches`: the rows of a padded batch;
* :mod:`kvprobe.prompts.encoding`: BOS and chat templates;
* :mod:`kvprobe.prompts.alignment`: which tokens cover which characters.
"""

from kvprobe.prompts.prompt import Prompt

__all__ = ["Prompt"]
