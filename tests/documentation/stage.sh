# Where the commands of a page run: test_shell_blocks.py puts this before them.
#
# The reader has more than one terminal, and answers questions. So a server in the foreground goes to the background here,
# and takes the place of the one before; what is live on a terminal gets one, and somebody who types. Commands that would
# take long get less to do. Nothing else is different.
set -emE -o pipefail
step=
trap 'echo "FAILED: $step" >&2' ERR
trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT
server= # the process in the foreground of the reader's first terminal

mkdir mnt
mkfifo announcements
exec 9<>announcements # a server says in one line that it listens

announced() {
    local line
    read -r -t 100 line <&9
    [[ $line == "listening on "* ]]
}

is_server() {
    [[ " $* " != *" --help "* && " $* " != *" --version "* && (${1:---} == serve || ${1:---} == -*) ]]
}

stop() {
    if [ "$server" ]; then
        kill "$server"
        wait "$server"
        server=
    fi
}

infinistore() {
    if is_server "$@"; then
        [ "$BASHPID" = $$ ] || exec infinistore "$@" >&9
        [[ " $* " == *" --take-over "* ]] || stop
        command infinistore "$@" >&9 &
        server=$!
        announced
        return
    fi
    case "$1 ${2-}" in
    "bench "*) command infinistore "$@" --seconds 0.02 ;;
    "demo "*) demo "$@" ;;
    "disk wipe" | "cluster purge") python -P "$here/terminal.py" 'y\n' infinistore "$@" ;;
    "doctor "*) doctor "$@" ;;
    "monitor "*) monitor "$@" ;;
    *) command infinistore "$@" ;;
    esac
}

demo() {
    [[ " $* " == *" --url "* ]] || set -- "$@" --pool-size 64MiB
    command infinistore "$@" --layers 3 --chunk-tokens 16 --prefill-tokens-per-s 100000
}

doctor() { # of a machine, it may find something bad
    [[ " $* " != *" --to "* ]] || set -- "$@" --seconds 0.02
    command infinistore "$@" || [ $? = 1 ]
}

monitor() {
    if [[ " $* " == *" --once "* ]]; then
        command infinistore "$@" --interval 0.1
    elif [[ " $* " == *" --json "* ]]; then # until it is stopped
        [ -p samples ] || mkfifo samples
        command infinistore "$@" --interval 0.1 >samples &
        read -r -t 60 sample <samples
        kill -INT $!
        wait $! || [ $? = 130 ]
    else
        python -P "$here/terminal.py" q infinistore "$@"
    fi
}

curl() { # an answer that says no is a failure
    command curl --fail-with-body --silent --show-error "$@"
}

command -v jq >/dev/null || jq() {
    python -m json.tool
}

systemctl() { # as the unit does; any other use of it is left out
    [ "$*" = "reload infinistore" ] && kill -HUP "$server"
}

node() { # another server of the cluster of this page
    command infinistore --cluster "$cluster" --node-id "$1" --service-port "$other_port" --unix-socket off --manage-port off >&9 &
    announced
}
