#!/usr/bin/env bash
# Runs the official clients, the examples of the documentation, and the page in Chromium against a
# server with the demo model:
#
#     run.sh PATH/TO/deepinfer
#
# What they need is installed into a temporary folder. With CI=true, Chromium is installed if it is not
# there, and must be there then; without it, the page is skipped. PICTURES names a folder for the page's
# pictures.
set -euo pipefail
bin=$(realpath "$1")
here=$(cd "$(dirname "$0")" && pwd)
docs=$here/../../../docs/server.md
work=$(mktemp -d)
pictures=${PICTURES:-$work/pictures}
mkdir -p "$pictures"
finish() {
    for pid in $(jobs -rp); do kill "$pid" 2>/dev/null || true; done
    for _ in $(seq 50); do
        [[ -n $(jobs -rp) ]] || break
        sleep 0.1
    done
    for pid in $(jobs -rp); do kill -KILL "$pid" 2>/dev/null || true; done
    wait
    rm -rf "$work"
}
trap finish EXIT

begin=$SECONDS
say() { echo "-- $* ($((SECONDS - begin)) s so far)"; }

# Waits until URL answers, for a minute at most and as long as PID lives.
await() {
    local last=$((SECONDS + 60))
    while ((SECONDS < last)); do
        kill -0 "$2" 2>/dev/null || break
        curl -sf --max-time 5 "$1" >/dev/null && return
        sleep 0.1
    done
    echo "FAILED: $1 does not answer" >&2
    return 1
}

say "installing the clients"
python3 -m venv "$work/venv"
timeout 900 "$work/venv/bin/pip" install --quiet --disable-pip-version-check \
    openai anthropic 'litellm[proxy]' >"$work/pip.log" 2>&1 ||
    { cat "$work/pip.log" >&2; exit 1; }
(cd "$work" && timeout 900 npm install --silent --no-audit --no-fund \
    openai typescript @types/node playwright-core >"$work/npm.log" 2>&1) ||
    { cat "$work/npm.log" >&2; exit 1; }
chromium=${CHROMIUM:-/usr/bin/chromium}
if [[ ! -x $chromium && ${CI:-false} == true ]]; then
    say "installing Chromium"
    (timeout 900 apt-get update -qq && timeout 900 apt-get install -y -qq --no-install-recommends chromium) \
        >"$work/apt.log" 2>&1 || { cat "$work/apt.log" >&2; exit 1; }
fi

say "starting the server"
"$bin" serve --port 0 --log json >"$work/out" 2>"$work/log" &
server=$!
for _ in $(seq 100); do
    base=$(sed -n 's/^serving .* on //p' "$work/out")
    [[ -n $base ]] && break
    sleep 0.1
done
[[ -n $base ]] || { cat "$work/log" >&2; exit 1; }
await "$base/ready" "$server"

say "the Python clients"
timeout 600 "$work/venv/bin/python" "$here/check.py" "$base" demo

say "the TypeScript client"
cp "$here/check.ts" "$work/check.mts"
(cd "$work" && timeout 600 node_modules/.bin/tsc --target es2022 --module nodenext --types node --strict --skipLibCheck check.mts)
timeout 600 node "$work/check.mjs" "$base" demo

say "the examples of the documentation"
timeout 600 "$work/venv/bin/python" "$here/examples.py" "$docs" "$base" "$work"

say "a proxy in between"
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
DEEPINFER=$base DEEPINFER_V1=$base/v1 LITELLM_MASTER_KEY=sk-only-for-this-test \
    LITELLM_LOCAL_MODEL_COST_MAP=True LITELLM_TELEMETRY=False \
    "$work/venv/bin/litellm" --config "$here/litellm.yaml" --host 127.0.0.1 --port "$port" \
    >"$work/litellm.log" 2>&1 &
proxy=$!
await "http://127.0.0.1:$port/health/liveliness" "$proxy" || { cat "$work/litellm.log" >&2; exit 1; }
for name in by-openai by-anthropic; do
    echo "$name:"
    timeout 600 "$work/venv/bin/python" "$here/check.py" "http://127.0.0.1:$port" "$name" \
        sk-only-for-this-test chat tools messages || { tail -n 40 "$work/litellm.log" >&2; exit 1; }
done
kill "$proxy"

if [[ -x $chromium ]]; then
    say "the page"
    cp "$here/page.mjs" "$work/page.mjs"
    CHROMIUM=$chromium timeout 600 node "$work/page.mjs" "$base" "$pictures"
elif [[ ${CI:-false} == true ]]; then
    echo "FAILED: $chromium is not there; CHROMIUM names another" >&2
    exit 1
else
    say "skipped, $chromium is not there: the page"
fi

say "the end"
kill -TERM "$server"
wait "$server" || { echo "FAILED: the server ended with $?" >&2; exit 1; }
if grep -E 'Say hello|你好|river and a mountain' "$work/log"; then
    echo "FAILED: a prompt is in the log" >&2
    exit 1
fi
say "done"
