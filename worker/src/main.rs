//! The program `bulkhead-worker`, which hosts `exec` and `library` bulkheads. The supervisor starts this program; users
//! do not. `host` parses the arguments and serves the jobs.

fn main() -> std::process::ExitCode {
    bulkhead_worker::host::main(std::env::args().skip(1))
}
