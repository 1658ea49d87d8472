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
    # Through the command line, for where releases keep the function that adds the options changes.
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    (serve,) = cmd_init()
    made: argparse.ArgumentParser = serve.subparser_init(FlexibleArgumentParser().add_subparsers())
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
