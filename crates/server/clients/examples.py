"""Takes the examples out of a page of the documentation and runs them against a server.

    python examples.py docs/server.md http://127.0.0.1:8000 WORK_FOLDER

Examples in sh that start with curl, in python and in typescript are run, in order; each must succeed
and print something. The work folder holds node_modules with openai and typescript.
"""

import re
import subprocess
import sys
from pathlib import Path

page, base, folder = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
text = page.read_text()
blocks = re.findall(r"^```(sh|python|typescript)\n(.*?)^```$", text, re.M | re.S)


def run(command, name, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, **options)
    if done.returncode != 0 or not done.stdout.strip() or '"error"' in done.stdout:
        sys.exit(f"{name} failed ({done.returncode}):\n{done.stdout}\n{done.stderr}")
    return done.stdout


count = {"sh": 0, "python": 0, "typescript": 0}
for number, (language, code) in enumerate(blocks):
    if language == "sh" and not code.startswith("curl "):
        continue
    name = f"{page.name}, {language} example {count[language] + 1}"
    code = code.replace("http://127.0.0.1:8000", base)
    if language == "sh":
        run(["bash", "-euo", "pipefail", "-c", code.replace("curl ", "curl -sS --fail-with-body ")], name)
    elif language == "python":
        run([sys.executable, "-c", code], name)
    else:
        source = folder / f"example{number}.mts"
        source.write_text(code)
        tsc = [str(folder / "node_modules/.bin/tsc"), "--target", "es2022", "--module", "nodenext", "--types", "node"]
        done = subprocess.run(
            [*tsc, "--strict", "--skipLibCheck", source.name], cwd=folder, capture_output=True, text=True
        )
        if done.returncode != 0:
            sys.exit(f"{name} is not valid TypeScript:\n{done.stdout}{done.stderr}")
        run(["node", str(source.with_suffix(".mjs"))], name, cwd=folder)
    count[language] += 1
    print(f"{name}: ok", flush=True)
if not all(count.values()):
    sys.exit(f"{page} has examples {count}; each language must have one")
