"""Run the program on standard input like an interactive prompt: if its last statement is an expression, print its
value.

Runs inside a sandbox, by any Python 3: standard library only.
"""

import ast
import linecache
import sys
import traceback

FILE = "<program>"


def main():
    source = sys.stdin.buffer.read().decode()
    linecache.cache[FILE] = (len(source), None, source.splitlines(True), FILE)  # so that tracebacks show lines
    names = sys.modules["__main__"].__dict__
    names.pop("__file__", None)
    try:
        body = ast.parse(source, FILE).body
        last = [body.pop()] if body and isinstance(body[-1], ast.Expr) else []
        module = ast.parse("")
        module.body = body
        exec(compile(module, FILE, "exec"), names)
        exec(compile(ast.Interactive(last), FILE, "single"), names)  # shows the value, unless it is None
    except SystemExit:
        raise
    except BaseException as error:  # the program of the model may raise anything; its traceback is the output
        traceback.print_exception(type(error), error, _filter_frames(error.__traceback__))
        sys.stdout.flush()
        sys.exit(1)


def _filter_frames(trace):
    """Remove the frames of this file."""
    while trace is not None and trace.tb_frame.f_code.co_filename != FILE:
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    main()
