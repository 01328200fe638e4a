//! Runs one part of a chain: `worker`, `slow-worker`, `echo [SOCKET]`, or `fork-server [PROFILE FOLDER]`.
//! Started by `bulkhead-bench`.

use std::path::Path;
use std::process::ExitCode;

use bulkhead_bench_parts::{echo, fork_server, worker};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match arguments[..] {
        ["worker"] => return worker::serve(),
        ["slow-worker"] => return worker::serve_slowly(),
        ["echo"] => echo::echo(None),
        ["echo", socket] => echo::echo(Some(Path::new(socket))),
        ["fork-server"] => fork_server::serve(None),
        ["fork-server", profile, folder] => fork_server::serve(Some((profile, Path::new(folder)))),
        _ => Err("this program is part of `bulkhead-bench`: run `bulkhead-bench` instead".into()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bulkhead-bench-parts: {error}");
            ExitCode::FAILURE
        }
    }
}
