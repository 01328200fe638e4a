//! The `bulkhead-fleet` program: the agent for a host, and commands for submitters and operators of a fleet.

mod program;

fn main() -> std::process::ExitCode {
    program::main()
}
