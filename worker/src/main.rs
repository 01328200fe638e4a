//! `bulkhead-worker`: the host behind `exec` and `library`. The supervisor starts it; nobody else need.

fn main() -> std::process::ExitCode {
    bulkhead_worker::host::main(std::env::args().skip(1))
}
