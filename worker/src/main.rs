//! `bulkhead-worker`: the host behind `exec` and `library`. Only the supervisor starts it.

fn main() -> std::process::ExitCode {
    bulkhead_worker::host::main(std::env::args().skip(1))
}
