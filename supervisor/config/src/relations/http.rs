//! Checks the keys for HTTP over TCP: the addresses, the admin token, and the listeners that tokens in `[[access]]`
//! require. Reads the token files, but opens no sockets. The control plane authenticates the requests.

use std::net::SocketAddr;
use std::ops::Range;
use std::path::PathBuf;

use super::Checker;
use crate::diagnostics::shown;
use crate::file::{RawAccess, RawSupervisor};
use crate::reader::{Field, Given};
use crate::token::Token;
use crate::values::ValueError;
use crate::{AccessConfig, HttpConfig, Role, TokenFile, programs};

impl Checker<'_> {
    /// Checks that `http` and `http_token_file` are either both set or both absent. Without a token, any process that
    /// can reach the address would have full access.
    pub(super) fn http(&mut self, raw: &RawSupervisor) -> Option<HttpConfig> {
        let address = self.address("http", "127.0.0.1:9464", &raw.http);
        let token_file = raw.http_token_file.given();
        let token_file = token_file.and_then(|given| self.token_file("http_token_file", given));
        match (&raw.http, &raw.http_token_file) {
            (Field::Given(http), Field::Absent) => self.problems.report(
                http.span.clone(),
                "`http` needs `http_token_file`: without a token, any process that connects could control \
                 the supervisor",
                "add `http_token_file = \"/etc/bulkhead/token\"`, a file that holds a token of 16 or more characters",
            ),
            (Field::Absent, Field::Given(file)) => self.problems.report(
                file.span.clone(),
                "`http_token_file` has no effect without `http`",
                "add `http = \"127.0.0.1:9464\"`, or remove `http_token_file`",
            ),
            _ => {}
        }
        let TokenFile { path: token_file, token } = token_file?;
        Some(HttpConfig { address: address?, token_file, token })
    }

    /// Returns the address of the jobs listener. Reports an error if the admin API has the same address.
    pub(super) fn jobs_http(&mut self, raw: &RawSupervisor) -> Option<SocketAddr> {
        let address = self.address("jobs_http", "0.0.0.0:9465", &raw.jobs_http)?;
        let http = raw.http.given().and_then(|given| given.value.parse::<SocketAddr>().ok());
        if address.port() != 0
            && http == Some(address)
            && let Some(given) = raw.jobs_http.given()
        {
            self.problems.report(
                given.span.clone(),
                format!("`jobs_http` and `http` are the same address: {address}"),
                "choose another port for `jobs_http`, such as 9465",
            );
        }
        Some(address)
    }

    fn address(&mut self, key: &str, example: &str, field: &Field<String>) -> Option<SocketAddr> {
        let given = field.given()?;
        let address = given.value.parse().map_err(|_| {
            ValueError::new(
                format!("`{key}` must be an address and a port, not `{}`", shown(&given.value)),
                format!(
                    "write `{key} = \"{example}\"`; an IPv6 address needs brackets, as in \"[::1]:9464\""
                ),
            )
        });
        self.ok_or_report(&given.span, address)
    }

    /// Reads a token from a file. Reports an error if the file does not contain a valid token.
    pub(super) fn token_file(&mut self, label: &str, given: &Given<String>) -> Option<TokenFile> {
        let path = programs::resolve(self.folder(&given.span), &given.value);
        let token = Token::read(&path)
            .map_err(|(message, help)| ValueError::new(format!("`{label}`: {message}"), help));
        self.ok_or_report(&given.span, token).map(|token| TokenFile { path, token })
    }

    /// Checks that a listener is configured for each token in `[[access]]`, that `jobs_http` has at least one token,
    /// and that no token has two roles.
    pub(super) fn check_tokens(
        &mut self,
        raw: &RawSupervisor,
        entries: &[RawAccess],
        access: &[AccessConfig],
    ) {
        for entry in entries {
            self.check_role(raw, entry);
        }
        let is_for_jobs = |entry: &RawAccess| !entry.token_file.is_absent() && role_of(entry) == Role::Jobs;
        if let Some(jobs_http) = raw.jobs_http.given()
            && !entries.iter().any(is_for_jobs)
        {
            self.problems.report(
                jobs_http.span.clone(),
                "`jobs_http` needs an [[access]] entry with `token_file`: without a token, no job would be accepted",
                "add an [[access]] section with `token_file = \"/etc/bulkhead/jobs-token\"`",
            );
        }
        self.check_token_uses(raw, entries, access);
    }

    /// Checks that an `[[access]]` entry with a role has a token, and that a listener is configured for the token.
    fn check_role(&mut self, raw: &RawSupervisor, entry: &RawAccess) {
        let Some(file) = entry.token_file.given() else {
            if let Some(role) = entry.role.given() {
                self.problems.report(
                    role.span.clone(),
                    "`role` needs `token_file`: only a token has a role",
                    "add `token_file`, or remove `role`",
                );
            }
            return;
        };
        if entry.role.is_invalid() {
            return;
        }
        let (listener, example) = match role_of(entry) {
            Role::Jobs => ("jobs_http", "0.0.0.0:9465"),
            Role::Read => ("http", "127.0.0.1:9464"),
        };
        let address = if listener == "http" { &raw.http } else { &raw.jobs_http };
        if address.is_absent() {
            self.problems.report(
                file.span.clone(),
                format!(
                    "`token_file` has no effect without `{listener}` because no client could use the token"
                ),
                format!("add `{listener} = \"{example}\"` to [supervisor], or remove the entry"),
            );
        }
        if role_of(entry) == Role::Read {
            let lists = [("bulkheads", &entry.bulkheads), ("tenants", &entry.tenants)];
            for (name, given) in lists.into_iter().filter_map(|(name, list)| Some((name, list.given()?))) {
                self.problems.report(
                    given.span.clone(),
                    format!("`{name}` has no effect with `role = \"read\"`, which reads the whole admin API"),
                    format!("remove `{name}`"),
                );
            }
        }
    }

    /// Reports a token that is used for two roles. The admin token in `http_token_file` cannot have any other role.
    fn check_token_uses(&mut self, raw: &RawSupervisor, entries: &[RawAccess], access: &[AccessConfig]) {
        let path = |given: &Given<String>| programs::resolve(self.folder(&given.span), &given.value);
        let admin_file: Option<PathBuf> = raw.http_token_file.given().map(path);
        let admin = admin_file.and_then(|path| Token::read(&path).ok());
        let mut conflicts: Vec<(Range<usize>, &str)> = Vec::new();
        for (index, (raw, entry)) in entries.iter().zip(access).enumerate() {
            let (Some(given), Some(file)) = (raw.token_file.given(), entry.who.token_file()) else {
                continue;
            };
            let has_other_role = |other: &AccessConfig| {
                other.role != entry.role
                    && other.who.token_file().is_some_and(|other| other.token == file.token)
            };
            if admin.as_ref() == Some(&file.token) {
                conflicts
                    .push((given.span.clone(), "`token_file` contains the same token as `http_token_file`"));
            } else if access[..index].iter().any(has_other_role) {
                conflicts.push((
                    given.span.clone(),
                    "`token_file` contains a token that already has another role",
                ));
            }
        }
        for (span, message) in conflicts {
            let help = "create another token: (umask 077; head -c 32 /dev/urandom | base64 > FILE)";
            self.problems.report(span, message, help);
        }
    }
}

fn role_of(entry: &RawAccess) -> Role {
    entry.role.value()
}
