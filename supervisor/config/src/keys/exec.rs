//! The tables of a bulkhead about the programs of `exec`.

use serde::Serialize;

use crate::key::Kind;
use crate::table::section;

section! {
    /// `exit_status`: the meaning of exit statuses.
    ExitStatusKeys => ExitStatus, "bulkhead.NAME.exit_status";

    /// Statuses with which the job is `ok`.
    ok: Vec<u8> as Kind::Statuses, without "`[0]`", such as "[0, 1]", reload ReplacesWorkers;
    /// Statuses that are the caller's fault. All others that are not `ok` are the dependency's.
    caller: Vec<u8> as Kind::Statuses, without "`[64, 65]`", such as "[2]", reload ReplacesWorkers;
    /// Statuses of failures that are worth another try.
    retryable: Vec<u8> as Kind::Statuses, without "`[75]`", such as "[75]", reload ReplacesWorkers;
}

section! {
    /// `files`: payload and result as files.
    FilesKeys => Files, "bulkhead.NAME.files", by rows;

    /// File that holds the payload, in place of standard input.
    input: String as Kind::Text, without "standard input", such as "\"in.mov\"", reload ReplacesWorkers;
    /// File that holds the result when the program has exited, in place of standard output, which goes to the log. It
    /// must be a regular file.
    output: String as Kind::Text, without "standard output", such as "\"out.mp4\"", reload ReplacesWorkers;
}

/// The meaning of exit statuses. No status is in two lists.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ExitStatus {
    /// Statuses with which the job is `ok`.
    pub ok: Vec<u8>,
    /// Statuses that are the caller's fault.
    pub caller: Vec<u8>,
    /// Statuses that are worth another try.
    pub retryable: Vec<u8>,
}

/// File names in the job's own folder, which is the working directory if there is one.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Files {
    /// File that holds the payload.
    pub input: Option<String>,
    /// File that holds the result.
    pub output: Option<String>,
}
