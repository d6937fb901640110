# What `attnlab preclass` runs on each machine, on the standard input of a POSIX shell.
# `wanted` (a folder, or nothing), `limit` (seconds) and `number` (the notebook) are set in front of it.
# The braces make the shell read all of it before it runs any, and keep commands from reading the rest of it.
{
part() { printf '\n@attnlab %s\n' "$1"; }
problem() { part "problem $1"; printf '%s\n' "$2"; exit 1; }
limited() {  # so that nothing goes on here when the other side has given up
  if timeout -s INT -k 1 9 true 2>/dev/null; then timeout -s INT -k 20 "$limit" "$@"; else "$@"; fi
}
attnlab() {  # its name and what it says, status and complaints
  name=$1; shift
  part "$name"
  limited "$python" -m attnlab "$@" 2>"$tmp/errors"
  status=$?
  part "$name-status"; printf '%s\n' "$status"
  part "$name-errors"; tail -n 20 "$tmp/errors"
}
tmp=
trap '[ -z "$tmp" ] || rm -rf "$tmp"' EXIT
trap 'exit 1' HUP INT PIPE TERM
part begin

case $wanted in
'') set -- . ./*/ "$HOME" "$HOME"/*/ /workspace /workspace/*/ ;;
'~' | '~/'*) set -- "$HOME${wanted#?}" ;;
*) set -- "$wanted" ;;
esac
part folders
course=
for place; do
  [ -f "$place/src/attnlab/cli.py" ] && [ -d "$place/notebooks" ] || continue
  place=$(CDPATH= cd -- "$place" && pwd -P) || continue
  printf '%s\n' "$place"
  course=${course:-$place}
done
everywhere='the folder that a shell starts in, ~ and /workspace, and one level below each'
[ "$course" ] && cd -- "$course" || problem folder "${wanted:-$everywhere}"

# In a pod of the course: its Python and its libraries, which a shell of `kubectl exec` does not know otherwise.
[ -r "${BASH_ENV:-}" ] && . "$BASH_ENV"
python=.venv/bin/python
if [ -x "$python" ]; then
  unset PYTHONPATH PYTHONHOME
else
  python=python3
  PYTHONPATH=$course/src${PYTHONPATH:+:$PYTHONPATH}
  export PYTHONPATH
fi
said=$("$python" -c '' 2>&1) || problem python "$said"
part python; printf '%s\n' "$python"
said=$(mktemp -d 2>&1) || problem temporary "$said"
tmp=$said

attnlab doctor doctor --json
[ "$status" = 0 ] || exit 1
attnlab run run "$number" --out "$tmp/out"
part outcome; cat "$tmp/out/run.json" 2>/dev/null
part records; cat "$tmp/out/results/"*.jsonl 2>/dev/null
part end
exit 0
} </dev/null
