//! `bulkhead-worker`: the host for `exec` and `library`. Only the supervisor starts it.

fn main() -> std::process::ExitCode {
    bulkhead_worker::host::main(std::env::args().skip(1))
}
