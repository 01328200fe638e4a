//! Enforces client permissions (`[[access]]`), and rejects clients that descend from a worker. A socket client is
//! identified once, when it connects. After that, each job is checked only against the rules that match its client.
//! Requests over TCP are identified by a token.

use std::collections::HashSet;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use bulkhead_shared::limits::{BULKHEAD_NAME_BYTES_MAX, TENANT_BYTES_MAX, truncate};

use crate::peer_check::{self, ClientRejection};
use bulkhead_config::{AccessConfig, Config, Role, Token, Who};
use bulkhead_linux::peer::{self, Peer, UnrelatedProcesses};

/// Permissions for all clients of the jobs socket.
pub struct Access {
    /// The supervisor's UID.
    own_uid: u32,
    /// True if tokens are configured. If so, jobs submitted over HTTP can be rejected by a token's rules.
    has_tokens: bool,
    /// Access rules, in the order in which they appear in the file. They also apply to root and the supervisor's user.
    /// If there are no rules, only these two users have access, without any restrictions.
    rules: Vec<Arc<AccessRule>>,
    /// Cache of processes known not to be descendants of the supervisor. Without this cache, checking ancestors would
    /// dominate the cost of accepting a connection.
    unrelated: Arc<UnrelatedProcesses>,
}

/// An access rule (`[[access]]`). Stores the names of bulkheads, because a reload can add and remove bulkheads.
#[derive(Debug)]
pub struct AccessRule {
    who: Who,
    bulkheads: Option<HashSet<Box<str>>>,
    tenants: Option<HashSet<Box<str>>>,
}

/// Permissions of one client.
pub enum Grant {
    /// The client can submit jobs to every bulkhead on behalf of every tenant.
    Unrestricted,
    /// A job is allowed if at least one of these rules allows it.
    Rules(Arc<[Arc<AccessRule>]>),
}

impl Grant {
    pub fn none() -> Self {
        Self::Rules(Arc::default())
    }
}

/// A client that submits jobs over HTTP.
#[derive(Clone, Debug)]
pub enum HttpClient {
    /// User of the admin socket, or holder of the admin token. Both have all permissions.
    Operator {
        uid: u32,
    },
    Token(TokenGrant),
}

impl HttpClient {
    /// Returns true if the client can submit jobs for the tenant to the bulkhead. `exists` is true if there is a
    /// bulkhead with this name.
    pub fn allows(&self, (bulkhead, exists): (&str, bool), tenant: &str) -> bool {
        match self {
            Self::Operator { .. } => true,
            Self::Token(grant) => rejection_message(&grant.rules, (bulkhead, exists), tenant).is_none(),
        }
    }

    /// Returns true if the client can submit jobs for at least one tenant to the bulkhead, if there is a bulkhead with
    /// this name.
    pub fn allows_bulkhead(&self, bulkhead: &str) -> bool {
        match self {
            Self::Operator { .. } => true,
            Self::Token(grant) => grant.allows_bulkhead(bulkhead),
        }
    }
}

/// Permissions of a token.
#[derive(Clone, Debug)]
pub struct TokenGrant {
    /// ID of the token.
    pub id: u32,
    pub role: Role,
    /// Rules for the token holder's jobs. Each job must be allowed by at least one rule.
    pub rules: Arc<[Arc<AccessRule>]>,
}

impl TokenGrant {
    /// Returns true if the token's holder can submit jobs for at least one tenant to the bulkhead, if there is a bulkhead
    /// with this name.
    pub fn allows_bulkhead(&self, bulkhead: &str) -> bool {
        self.rules.iter().any(|rule| rule.allows_bulkhead(bulkhead, true))
    }
}

/// All tokens in `[[access]]`.
#[derive(Debug, Default)]
pub struct Tokens(Vec<(Token, TokenGrant)>);

impl Tokens {
    pub fn new(config: &Config) -> Self {
        let mut tokens: Vec<(Token, TokenGrant)> = Vec::new();
        for entry in &config.access {
            let Some(file) = entry.who.token_file() else { continue };
            let own = [Arc::new(AccessRule::new(entry))];
            match tokens.iter_mut().find(|(token, _)| *token == file.token) {
                Some((_, grant)) => grant.rules = grant.rules.iter().cloned().chain(own).collect(),
                None => {
                    let grant = TokenGrant { id: file.token.id(), role: entry.role, rules: own.into() };
                    tokens.push((file.token.clone(), grant));
                }
            }
        }
        Self(tokens)
    }

    pub fn grants(&self) -> Vec<TokenGrant> {
        self.0.iter().map(|(_, grant)| grant.clone()).collect()
    }

    /// Returns true if a token with this ID exists.
    pub fn has(&self, id: u32) -> bool {
        self.0.iter().any(|(_, grant)| grant.id == id)
    }

    /// Returns the permissions of the token with this `secret`. Always compares the secret with all tokens, each in
    /// constant time.
    pub fn find(&self, secret: &[u8]) -> Option<&TokenGrant> {
        let given = Token::new(secret);
        self.0.iter().fold(None, |found, (token, grant)| if *token == given { Some(grant) } else { found })
    }
}

impl Access {
    pub fn new(config: &Config, own_uid: u32) -> Self {
        let (tokens, of_socket): (Vec<_>, Vec<_>) =
            config.access.iter().partition(|entry| entry.who.token_file().is_some());
        Self {
            own_uid,
            has_tokens: !tokens.is_empty(),
            rules: of_socket.into_iter().map(|entry| Arc::new(AccessRule::new(entry))).collect(),
            unrelated: Arc::default(),
        }
    }

    /// Replaces the cache of processes known not to be descendants of the supervisor. Called during a reload to
    /// preserve the cached entries.
    pub fn with_unrelated(self, unrelated: Arc<UnrelatedProcesses>) -> Self {
        Self { unrelated, ..self }
    }

    pub fn unrelated(&self) -> Arc<UnrelatedProcesses> {
        self.unrelated.clone()
    }

    /// Returns true if the configuration has rules or tokens, so that jobs can be rejected as `forbidden`.
    pub fn has_rules(&self) -> bool {
        self.has_tokens || !self.rules.is_empty()
    }

    /// Returns true if the peer runs as the supervisor's user. A worker without a separate user also runs as this user.
    pub fn is_own_user(&self, peer: Peer) -> bool {
        peer.uid == self.own_uid
    }

    /// Rejects the peer if it is a worker or a descendant of a worker.
    pub fn check_descent(&self, socket: &impl AsFd, peer: Peer) -> Result<(), ClientRejection> {
        peer_check::check_descent(socket, peer, &self.unrelated)
    }

    /// Returns the permissions of the client at the other end of `socket`. Rejects a client that has no permissions.
    pub fn grant(&self, peer: Peer, socket: &impl AsFd) -> Result<Grant, ClientRejection> {
        let (uid, own, rules) = (peer.uid, self.own_uid, &self.rules);
        if rules.is_empty() {
            if self.is_own_user(peer) || uid == 0 {
                return Ok(Grant::Unrestricted);
            }
            let message = format!("user {uid} cannot submit jobs here: only user {own} and root can");
            return Err(ClientRejection::forbidden(peer, message));
        }
        let matching_rules = matching_rules(rules, peer, socket)
            .map_err(|error| ClientRejection::unidentified(Some(peer), &error))?;
        if matching_rules.is_empty() {
            let message = format!(
                "user {uid} cannot submit jobs here: no [[access]] entry in the supervisor's configuration \
                 names that user or one of the user's groups"
            );
            return Err(ClientRejection::forbidden(peer, message));
        }
        Ok(Grant::Rules(matching_rules))
    }
}

impl AccessRule {
    fn new(entry: &AccessConfig) -> Self {
        let set = |names: &Vec<String>| names.iter().map(|name| name.as_str().into()).collect();
        let (bulkheads, tenants) = (entry.bulkheads.as_ref().map(set), entry.tenants.as_ref().map(set));
        Self { who: entry.who.clone(), bulkheads, tenants }
    }

    fn allows_bulkhead(&self, name: &str, exists: bool) -> bool {
        self.bulkheads.as_ref().is_none_or(|some| exists && some.contains(name))
    }

    fn allows_tenant(&self, tenant: &str) -> bool {
        self.tenants.as_ref().is_none_or(|some| some.contains(tenant))
    }
}

/// Returns the rules that match the user or the groups of the peer process.
fn matching_rules(
    rules: &[Arc<AccessRule>],
    peer: Peer,
    socket: &impl AsFd,
) -> io::Result<Arc<[Arc<AccessRule>]>> {
    let has_groups = rules.iter().any(|rule| matches!(rule.who, Who::Gid(_)));
    let mut groups = if has_groups { peer::groups(socket)? } else { Vec::new() };
    groups.push(peer.gid);
    let matches = |rule: &&Arc<AccessRule>| match rule.who {
        Who::Uid(uid) => uid == peer.uid,
        Who::Gid(gid) => groups.contains(&gid),
        Who::TokenFile(_) => false,
    };
    Ok(rules.iter().filter(matches).cloned().collect())
}

/// Returns the reason why the rules do not allow a client to submit a job, or `None` if the job is allowed. Only
/// clients with access to all bulkheads can find out whether a bulkhead exists.
pub fn rejection_message(
    rules: &[Arc<AccessRule>],
    (name, exists): (&str, bool),
    tenant: &str,
) -> Option<String> {
    let mut allowing = rules.iter().filter(|rule| rule.allows_bulkhead(name, exists)).peekable();
    let name = truncate(name, BULKHEAD_NAME_BYTES_MAX).escape_debug();
    if allowing.peek().is_none() {
        return Some(format!("you have no access to a bulkhead named '{name}'"));
    }
    // If the bulkhead does not exist, the tenant is not checked, because the caller rejects the job as `not_found`.
    if !exists || allowing.any(|rule| rule.allows_tenant(tenant)) {
        return None;
    }
    Some(match truncate(tenant, TENANT_BYTES_MAX) {
        "" => format!("each of your jobs for bulkhead '{name}' must name a permitted tenant"),
        tenant => {
            let tenant = tenant.escape_debug();
            format!("you cannot send jobs for tenant '{tenant}' to bulkhead '{name}'")
        }
    })
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::OpenOptionsExt;

    use super::*;

    #[test]
    fn token_has_the_rules_from_all_its_entries() {
        let folder = tempfile::tempdir().unwrap();
        for (name, secret) in [("one", "the-first-of-the-tokens"), ("two", "the-second-of-the-tokens")] {
            let mut options = std::fs::OpenOptions::new();
            let file = options.create_new(true).write(true).mode(0o600).open(folder.path().join(name));
            file.unwrap().write_all(secret.as_bytes()).unwrap();
        }
        let text = "[supervisor]\nsocket = 'jobs.sock'\njobs_http = '127.0.0.1:0'\n\
                    [[access]]\ntoken_file = 'one'\nbulkheads = ['a']\n\
                    [[access]]\nuid = 5\n\
                    [[access]]\ntoken_file = 'two'\n\
                    [[access]]\ntoken_file = 'one'\nbulkheads = ['b']\ntenants = ['t']\n\
                    [bulkhead.a]\nexec = ['cat']\n[bulkhead.b]\nexec = ['cat']\n";
        let config = bulkhead_config::parse(text, &folder.path().join("workers.toml")).unwrap();
        let tokens = Tokens::new(&config);
        let one = tokens.find(b"the-first-of-the-tokens").unwrap();
        let two = tokens.find(b"the-second-of-the-tokens").unwrap();
        assert_ne!(one.id, two.id);
        assert!(tokens.has(one.id) && tokens.has(two.id) && !tokens.has(one.id ^ two.id));
        assert!(tokens.find(b"the-first-of-the-token").is_none() && tokens.find(b"").is_none());
        let may = |grant: &TokenGrant, name: &str, tenant: &str| {
            rejection_message(&grant.rules, (name, true), tenant).is_none()
        };
        assert!(may(one, "a", "") && may(one, "b", "t") && !may(one, "b", "other"));
        assert!(may(two, "a", "any") && may(two, "b", ""));
        assert!(Tokens::default().find(b"the-first-of-the-tokens").is_none());
        // Entries for tokens do not apply to the jobs socket, so only the entry for a user is left.
        assert_eq!(Access::new(&config, 0).rules.len(), 1);
    }
}
