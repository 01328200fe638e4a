//! `bulkhead-worker`: the host for `exec` and `library`. The supervisor starts this program; users do not.

fn main() -> std::process::ExitCode {
    bulkhead_worker::host::main(std::env::args().skip(1))
}
