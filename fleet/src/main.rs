//! The `bulkhead-fleet` program, which contains the agent for a host and commands for submitters and operators of a
//! fleet. `program` parses the command line and runs the command.

mod program;

fn main() -> std::process::ExitCode {
    program::main()
}
