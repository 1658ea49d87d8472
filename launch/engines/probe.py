"""Run by an engine's own Python: prints the options of its server as one JSON object.

Only the standard library and the engine are importable here. Output: spelling → {takes_value,
choices}.
"""

import argparse
import json
import sys


def _parser(engine: str) -> argparse.ArgumentParser:
    if engine == "sglang":
        from sglang.srt.plugins import load_plugins

        load_plugins()
        from sglang.srt.server_args import ServerArgs

        parser = argparse.ArgumentParser()
        ServerArgs.add_cli_args(parser)
        return parser
    from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    made: argparse.ArgumentParser = make_arg_parser(FlexibleArgumentParser())
    return made


def main() -> None:
    listed = {
        spelling: {
            "takes_value": action.nargs != 0,
            "choices": None if action.choices is None else [str(c) for c in action.choices],
        }
        for action in _parser(sys.argv[1])._actions
        for spelling in action.option_strings
    }
    print(json.dumps(listed))


if __name__ == "__main__":
    main()
