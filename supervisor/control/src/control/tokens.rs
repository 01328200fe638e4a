//! Stores the tokens from `[[access]]`, finds the secret in a request, and looks up the permissions of the token. `tcp`
//! and `jobs_http` decide if the request is allowed. Also keeps each token's counters for payloads of unknown length.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use axum::http::{HeaderMap, header};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bulkhead_config::Config;
use bulkhead_plane::access::{TokenGrant, Tokens};
use bulkhead_plane::command::{Command, CommandSender};
use bulkhead_plane::counters::SpoolCounters;

/// The tokens that are currently valid. A reload replaces them.
pub(super) struct TokenTable {
    tokens: RwLock<Tokens>,
    /// Counters for payloads of unknown length that are being received, by token ID.
    spools: Mutex<HashMap<u32, Arc<SpoolCounters>>>,
}

impl TokenTable {
    pub(super) fn new(config: &Config) -> Self {
        Self { tokens: RwLock::new(Tokens::new(config)), spools: Mutex::default() }
    }

    /// Replaces all tokens with the tokens of a new configuration. Does not affect jobs that have already been
    /// submitted.
    pub(super) fn update(&self, config: &Config) {
        let tokens = Tokens::new(config);
        let mut spools = self.spools.lock().unwrap_or_else(PoisonError::into_inner);
        spools.retain(|id, _| tokens.has(*id));
        *self.tokens.write().unwrap_or_else(PoisonError::into_inner) = tokens;
    }

    /// Returns the permissions of all tokens.
    pub(super) fn all(&self) -> Vec<TokenGrant> {
        self.tokens.read().unwrap_or_else(PoisonError::into_inner).grants()
    }

    /// Returns the permissions of the token with this secret.
    pub(super) fn find(&self, secret: &[u8]) -> Option<TokenGrant> {
        self.tokens.read().unwrap_or_else(PoisonError::into_inner).find(secret).cloned()
    }

    /// Returns the counters for payloads of unknown length that are sent with a token. If there are none yet, creates
    /// them and registers them with the data plane.
    pub(super) fn spool(&self, token: u32, commands: &CommandSender) -> Arc<SpoolCounters> {
        let mut spools = self.spools.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(spool) = spools.get(&token) {
            return spool.clone();
        }
        let spool = Arc::<SpoolCounters>::default();
        // If the command queue is full, the token's figures do not include this payload. The next payload registers the
        // counters.
        if commands.send(Command::AddSpool { token, spool: spool.clone() }).is_ok() {
            spools.insert(token, spool.clone());
        }
        spool
    }
}

/// Marker for requests whose token is read-only. Responses to these requests must not contain payloads.
#[derive(Clone, Copy)]
pub(super) struct ReadOnly;

/// Returns the bearer token of a request, if there is exactly one.
pub(super) fn bearer_token(headers: &HeaderMap) -> Option<&[u8]> {
    let (scheme, rest) = credentials(headers)?;
    scheme.eq_ignore_ascii_case("Bearer").then_some(rest.as_bytes())
}

/// Returns the secret in a request if there is exactly one. The secret can be a bearer token, or the password of a
/// login with any user name, because browsers send a token as a password.
pub(super) fn secret(headers: &HeaderMap) -> Option<Vec<u8>> {
    let (scheme, rest) = credentials(headers)?;
    if scheme.eq_ignore_ascii_case("Bearer") {
        return Some(rest.into());
    }
    if !scheme.eq_ignore_ascii_case("Basic") {
        return None;
    }
    let pair = STANDARD.decode(rest).ok()?;
    let colon = pair.iter().position(|&byte| byte == b':')?;
    Some(pair[colon + 1..].to_vec())
}

/// Returns the scheme and the credentials of a request that has exactly one `Authorization` header.
fn credentials(headers: &HeaderMap) -> Option<(&str, &str)> {
    let mut values = headers.get_all(header::AUTHORIZATION).iter();
    let (Some(value), None) = (values.next(), values.next()) else { return None };
    let (scheme, rest) = value.to_str().ok()?.split_once(' ')?;
    Some((scheme, rest.trim()))
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    fn headers(values: &[&str]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(header::AUTHORIZATION, HeaderValue::from_str(value).unwrap());
        }
        headers
    }

    #[test]
    fn request_must_contain_exactly_one_secret() {
        let found = |value: &str| secret(&headers(&[value]));
        for good in ["Bearer a-secret", "bearer  a-secret "] {
            assert_eq!(found(good).unwrap(), b"a-secret", "{good}");
            assert_eq!(bearer_token(&headers(&[good])).unwrap(), b"a-secret", "{good}");
        }
        for wrong in ["", "Bearer", "Digest a-secret", "a-secret", "Basic a-secret"] {
            assert_eq!(found(wrong), None, "{wrong}");
        }
        let basic = |pair: &str| format!("Basic {}", STANDARD.encode(pair));
        for pair in ["x:a-secret", ":a-secret"] {
            assert_eq!(found(&basic(pair)).unwrap(), b"a-secret", "{pair}");
            assert_eq!(found(&basic(pair).replace("Basic", "basic")).unwrap(), b"a-secret", "{pair}");
            assert_eq!(bearer_token(&headers(&[&basic(pair)])), None, "{pair}");
        }
        assert_eq!(found(&basic("x:y:a-secret")).unwrap(), b"y:a-secret");
        assert_eq!(found(&basic("a-secret")), None);
        assert_eq!(secret(&headers(&["Bearer a-secret", "Bearer a-secret"])), None);
        assert_eq!(secret(&HeaderMap::new()), None);
    }
}
