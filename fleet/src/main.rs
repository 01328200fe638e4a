//! The `bulkhead-fleet` program: the agent of a host, and commands for submitters and operators of a fleet.

mod program;

fn main() -> std::process::ExitCode {
    program::main()
}
