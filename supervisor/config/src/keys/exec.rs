//! Declares the `exit_status` and `files` tables of a bulkhead, which apply only to `exec` programs. Also defines the
//! types of the validated values. `relations/exec.rs` checks the values. The key `output_grace` is declared in
//! `bulkhead.rs`.

use serde::Serialize;

use crate::key::Kind;
use crate::table::section;

section! {
    /// `exit_status`: meaning of a program's exit statuses.
    ExitStatusKeys => ExitStatus, "bulkhead.NAME.exit_status";

    /// Exit statuses for which the job is `ok`.
    ok: Vec<u8> as Kind::Statuses, without "`[0]`", such as "[0, 1]", reload ReplacesWorkers;
    /// Exit statuses for failures that are the caller's fault. All other failures are the dependency's fault.
    caller: Vec<u8> as Kind::Statuses, without "`[64, 65]`", such as "[2]", reload ReplacesWorkers;
    /// Exit statuses for failures after which the job can be retried.
    retryable: Vec<u8> as Kind::Statuses, without "`[75]`", such as "[75]", reload ReplacesWorkers;
}

section! {
    /// `files`: names of files through which a program gets the payload and returns the result.
    FilesKeys => Files, "bulkhead.NAME.files", by rows;

    /// Name of a file from which the program reads the payload, instead of standard input.
    input: String as Kind::Text, without "standard input", such as "\"in.mov\"", reload ReplacesWorkers;
    /// Name of a file to which the program writes the result. Standard output then goes to the log. When the
    /// program has exited, the file must be a regular file.
    output: String as Kind::Text, without "standard output", such as "\"out.mp4\"", reload ReplacesWorkers;
}

/// Meaning of a program's exit statuses. Each status is in at most one list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ExitStatus {
    /// Exit statuses for which the job is `ok`.
    pub ok: Vec<u8>,
    /// Exit statuses for failures that are the caller's fault.
    pub caller: Vec<u8>,
    /// Exit statuses for failures after which the job can be retried.
    pub retryable: Vec<u8>,
}

/// Names of a job's input and output files. If either is set, each job has a separate folder, which is the program's
/// working directory.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Files {
    /// Name of the file that holds the payload. `None` means that the program reads the payload from standard input.
    pub input: Option<String>,
    /// Name of the file that holds the result. `None` means that the program writes the result to standard output.
    pub output: Option<String>,
}
