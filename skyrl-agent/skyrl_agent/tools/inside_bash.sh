# Made ready here: the command on standard input, in the directory and with the exported variables that the last one of
# this shell ($1) left. Run by `eval` on the caller's first line, so that bash counts the command's lines from 1.
exec 2>&1
IFS= read -r -d '' __agent_command
exec </dev/null
__agent_state=${TMPDIR:-/tmp}/.agent-shell-$1

# What the sandbox itself puts there (SKYRL_*) is each command's own.
if [ -r "$__agent_state" ]; then
    for __agent_name in $(compgen -e); do
        case $__agent_name in SKYRL_* | PWD) ;; *) unset "$__agent_name" ;; esac
    done 2>/dev/null
    . "$__agent_state"
fi

__agent_save() {
    set +eux
    [ -z "$__agent_saved" ] || return
    __agent_saved=1
    {
        printf 'cd -- %q 2>/dev/null || echo "[the working directory is gone; back in $PWD]"\n' "$PWD"
        compgen -e | while IFS= read -r __agent_name; do
            case $__agent_name in SKYRL_* | PWD | OLDPWD | SHLVL | _) ;; *) declare -p "$__agent_name" ;; esac
        done
    } >|"$__agent_state.new" && command -p mv -f -- "$__agent_state.new" "$__agent_state"
}

__agent_end() {
    __agent_save
    exit "$1"
}

trap '{ __agent_save; } 2>/dev/null' EXIT
set --
