"""Four questions asked of workers that are already running: ``python -m sglang_ext.bench --help``.

`identity` (does the path change the tokens?), `stall` (what a long prompt does to running decodes),
`tax` (what it costs to be elastic and never use it) and `transfer` (time against bytes). Each is a
phase that appends raw samples to ``samples.jsonl`` as it measures, so that a run that is cut short
keeps what it has; `report` makes one JSON file and one Markdown file of whatever is there.

Runs in the project's own environment, outside SGLang, and knows workers only by URL: unlike
``deltaserve eval micro``, which starts a fleet with one worker a GPU, it can ask any number of
workers that share one. Must not import anything of SGLang, nor another room.
"""
