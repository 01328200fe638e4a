//! Tables of a bulkhead about `exec` programs.

use serde::Serialize;

use crate::key::Kind;
use crate::table::section;

section! {
    /// `exit_status`: meaning of exit statuses.
    ExitStatusKeys => ExitStatus, "bulkhead.NAME.exit_status";

    /// Exit statuses for which the job is `ok`.
    ok: Vec<u8> as Kind::Statuses, without "`[0]`", such as "[0, 1]", reload ReplacesWorkers;
    /// Exit statuses that are the caller's fault. All others that are not `ok` are the dependency's fault.
    caller: Vec<u8> as Kind::Statuses, without "`[64, 65]`", such as "[2]", reload ReplacesWorkers;
    /// Exit statuses of failures that are worth a retry.
    retryable: Vec<u8> as Kind::Statuses, without "`[75]`", such as "[75]", reload ReplacesWorkers;
}

section! {
    /// `files`: payload and result as files.
    FilesKeys => Files, "bulkhead.NAME.files", by rows;

    /// File that holds the payload, in place of standard input.
    input: String as Kind::Text, without "standard input", such as "\"in.mov\"", reload ReplacesWorkers;
    /// File that holds the result when the program has exited, in place of standard output, which goes to the
    /// log. Must be a regular file.
    output: String as Kind::Text, without "standard output", such as "\"out.mp4\"", reload ReplacesWorkers;
}

/// Meaning of exit statuses. No status is in more than one list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ExitStatus {
    /// Exit statuses for which the job is `ok`.
    pub ok: Vec<u8>,
    /// Exit statuses that are the caller's fault.
    pub caller: Vec<u8>,
    /// Exit statuses of failures that are worth a retry.
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
