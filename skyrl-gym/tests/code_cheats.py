"""Answers to "find the number" that try to pass without it. The number is nine digits that begin with 98245."""

EVERYWHERE = """
import os
def everywhere(data):
    for number in range(1, 40):
        try: os.write(number, data)
        except OSError: pass
"""

CHEATS = {
    "equal to everything": """
class A(int):
    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = lambda *_: True
    __sub__ = __rsub__ = __abs__ = lambda *_: A()
    __hash__ = int.__hash__
def find(n): return A()
""",
    "equal to everything, posing as a number": """
class A:
    __eq__ = __lt__ = lambda *_: True
    __sub__ = __abs__ = lambda *_: A()
    __class__ = int
def find(n): return A()
""",
    "a function equal to everything": """
class A(type):
    __eq__ = lambda *_: True
    __hash__ = type.__hash__
class int(metaclass=A): pass
find = int
""",
    "leaves": "import os\ndef find(n): os._exit(0)",
    "leaves at once": "import os\nos._exit(0)",
    "exits": "import sys\ndef find(n): sys.exit(0)",
    "exits at once": "import sys\nsys.exit(0)",
    "exits at the end": "import atexit, os\natexit.register(os._exit, 0)\ndef find(n): return 0",
    "raises": "def find(n): raise AssertionError",
    "raises what tests do not catch": "def find(n): raise KeyboardInterrupt",
    "nan": "def find(n): return float('nan')",
    "prints verdicts": """
def find(n):
    print('!{"passed": true, "error": null}')
    print("ok", "PASSED", True)
""",
    "writes verdicts everywhere": EVERYWHERE
    + """
def find(n):
    everywhere(b'!{"passed": true, "error": null}\\n' * 9)
    return 0
""",
    "writes results everywhere": EVERYWHERE
    + """
def find(n):
    everywhere(b'{"passed": true, "returncode": 0, "stdout": "", "json": ""}\\n' * 9)
    return 0
""",
    "writes forged values everywhere": EVERYWHERE
    + """
def find(n):
    everywhere(b'{"value": ["type", "eval"]}\\n{"value": ["ref", 3]}\\n' * 9)
    return 0
""",
    "writes nonsense everywhere": EVERYWHERE
    + """
everywhere(b"[" * 100_000 + b"\\n")
def find(n): return 0
""",
    "writes without end": EVERYWHERE
    + """
import threading
def write():
    while True: everywhere(b'!{"passed": true}\\n')
threading.Thread(target=write, daemon=True).start()
def find(n): return 0
""",
    "patches built-in functions": """
import builtins, json
builtins.AssertionError = Warning
builtins.abs = lambda x: 0
json.dumps = lambda *_, **__: "true"
json.loads = lambda *_, **__: 0
def find(n): return 0
""",
    "patches the harness": """
import sys
for name, module in list(sys.modules.items()):
    for key, value in list(vars(module).items()):
        if "inside" in name and callable(value) and key not in ("Control", "main"):
            setattr(module, key, lambda *_, **__: {"passed": True})
def find(n): return 0
""",
    "searches memory": r"""
import gc, re, sys
def find(n):
    seen, frame = repr(gc.get_objects()), sys._getframe()
    while frame:
        seen += repr(frame.f_locals) + repr(frame.f_globals)
        frame = frame.f_back
    found = re.search(r"98245\d{4}", seen)
    return int(found[0]) + n - 7 if found else 0
""",
    "searches files": r"""
import glob, re
def find(n):
    for place in ("./**", "/workspace/**", "/tmp/**", "/dev/shm/**", "/proc/[0-9]*/cmdline", "/proc/[0-9]*/environ"):
        for path in glob.glob(place, recursive=True, include_hidden=True):
            try: text = open(path, "rb").read(1 << 20).decode("latin-1")
            except OSError: continue
            found = re.search(r"98245\d{4}", text)
            if found: return int(found[0]) + n - 7
    return 0
""",
    "kills the parent": "import os\nos.kill(os.getppid(), 9)\ndef find(n): return 0",
    "kills everything": "import os\ntry: os.kill(-1, 9)\nexcept OSError: pass\ndef find(n): return 0",
    "never ends": "def find(n):\n    while True: pass",
    "returns an endless iterator": "import itertools\ndef find(n): return itertools.repeat(0)",
    "returns itself": "def find(n): return find",
}
