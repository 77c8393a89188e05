//! The bearer key, and without one, whose requests are answered.

use super::error::ApiError;
use super::{Service, Shared};
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Response, header};
use axum::middleware::Next;
use std::fmt;
use std::net::IpAddr;
use subtle::ConstantTimeEq;

/// The key that clients must send as `Authorization: Bearer <key>`.
#[derive(Clone, PartialEq, Eq)]
pub struct ApiKey(String);

impl ApiKey {
    /// The key `key`.
    ///
    /// # Errors
    /// The rule it breaks: a key has 8 to 512 characters without spaces.
    pub fn new(key: impl Into<String>) -> Result<Self, String> {
        let key = key.into();
        if !(8..=512).contains(&key.len()) || !key.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err("an API key has 8 to 512 printable ASCII characters and no spaces".to_owned());
        }
        Ok(Self(key))
    }

    /// A key of 256 random bits.
    ///
    /// # Errors
    /// Where the system has no random numbers to give, in words.
    pub fn random() -> Result<Self, String> {
        let bytes = super::random::<32>().map_err(|error| format!("the system gives no random numbers: {error}"))?;
        Ok(Self(format!("sk-{}", super::hex(&bytes))))
    }

    /// The key, to be shown once.
    #[must_use]
    pub fn reveal(&self) -> &str {
        &self.0
    }

    /// Compared in a time that tells nothing of the key's bytes.
    fn admits(&self, value: Option<&HeaderValue>) -> bool {
        let given = value.map(HeaderValue::as_bytes).unwrap_or_default();
        let is_bearer = given.len() >= 7 && given[..7].eq_ignore_ascii_case(b"bearer ");
        let given = given.get(7..).unwrap_or_default();
        is_bearer & bool::from(given.ct_eq(self.0.as_bytes()))
    }
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ApiKey(hidden)")
    }
}

pub(super) async fn check(State(service): State<Shared>, request: Request, next: Next) -> Response<Body> {
    match refusal(&service, request.headers()) {
        Some(error) => {
            let (parts, body) = request.into_parts();
            super::read::discard(&parts.headers, body).await;
            error.into_response()
        }
        None => next.run(request).await,
    }
}

/// Why a request with these headers is not answered: its key, or where there is none, the page or name it comes by.
pub(super) fn refusal(service: &Service, headers: &HeaderMap) -> Option<ApiError> {
    match &service.api_key {
        Some(key) => (!key.admits(headers.get(header::AUTHORIZATION))).then(ApiError::unauthorized),
        None => (!comes_from_here(headers, &service.origins)).then(ApiError::foreign_page),
    }
}

/// Whether no page of another site is behind a request: any page may send requests to this machine, and may even read the answers
/// where a name of its own leads here. `Host` has to be an address or a name of this machine (or that of an allowed origin);
/// `Origin`, which browsers add, has to be allowed or the server's own.
fn comes_from_here(headers: &HeaderMap, allowed: &[String]) -> bool {
    let text = |name| headers.get(name).map(|value| value.to_str().unwrap_or_default());
    let host = text(header::HOST);
    let is_allowed_host = |host| allowed.iter().any(|origin| authority_of(origin) == Some(host));
    let is_host = host.is_none_or(|host| is_local(host) || is_allowed_host(host));
    let is_origin = text(header::ORIGIN).is_none_or(|origin| {
        let is_own = host.is_some() && authority_of(origin) == host;
        is_own || allowed.iter().any(|allowed| allowed == origin)
    });
    is_host && is_origin
}

/// `host:port` of an origin.
fn authority_of(origin: &str) -> Option<&str> {
    origin.split_once("://").map(|(_, authority)| authority)
}

/// Whether `authority` is an address, or a name that leads to this machine wherever it is asked for.
fn is_local(authority: &str) -> bool {
    let is_port = |port: &str| port.bytes().all(|byte| byte.is_ascii_digit());
    let host = match authority.rsplit_once(':') {
        Some((host, port)) if is_port(port) && !host.contains(':') => host,
        Some((host, port)) if is_port(port) && host.ends_with(']') => host,
        _ => authority,
    };
    let name = host.trim_end_matches('.').to_ascii_lowercase();
    let address = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(&name);
    name == "localhost" || name.ends_with(".localhost") || address.parse::<IpAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_whole_key_admits() {
        let key = ApiKey::new("secret-key").unwrap();
        let admits = |bytes: &[u8]| key.admits(HeaderValue::from_bytes(bytes).ok().as_ref());
        assert!(admits(b"Bearer secret-key"));
        assert!(admits(b"bearer secret-key"));
        for wrong in [&b"Bearer secret-ke"[..], b"Bearer secret-key ", b"secret-key", b"", b"Bearer \xe9\xff"] {
            assert!(!admits(wrong), "{wrong:?}");
        }
        assert!(!key.admits(None));
    }

    /// A page of any site could use a server without a key, and read its answers by a name that leads here.
    #[test]
    fn without_a_key_pages_of_other_sites_are_refused() {
        let allowed = ["http://localhost:3000".to_owned(), "https://ui.test".to_owned()];
        let comes_from_here = |host: Option<&'static str>, origin: Option<&'static str>| {
            let mut headers = HeaderMap::new();
            host.map(|host| headers.insert(header::HOST, HeaderValue::from_static(host)));
            origin.map(|origin| headers.insert(header::ORIGIN, HeaderValue::from_static(origin)));
            super::comes_from_here(&headers, &allowed)
        };
        let local = [
            "127.0.0.1:8000",
            "localhost",
            "localhost:8000",
            "LOCALHOST.:80",
            "a.localhost:1",
            "[::1]:8000",
            "192.168.0.2",
        ];
        for host in local.into_iter().chain(["ui.test"]) {
            assert!(comes_from_here(Some(host), None), "{host}");
        }
        assert!(comes_from_here(None, None), "HTTP/1.0");
        for host in ["evil.test", "localhost.evil.test:8000", "evil.test:127", "", "127.0.0.1.evil.test", "[evil]"] {
            assert!(!comes_from_here(Some(host), None), "{host}");
        }
        for origin in ["http://localhost:3000", "https://ui.test", "http://127.0.0.1:8000"] {
            assert!(comes_from_here(Some("127.0.0.1:8000"), Some(origin)), "{origin}");
        }
        for origin in ["https://evil.test", "null", "http://localhost:3001", "", "http://localhost:3000.evil.test"] {
            assert!(!comes_from_here(Some("127.0.0.1:8000"), Some(origin)), "{origin}");
        }
    }

    #[test]
    fn keys_are_checked_and_not_shown() {
        assert!(ApiKey::new("short").is_err());
        assert!(ApiKey::new("with a space").is_err());
        assert_ne!(ApiKey::random().unwrap(), ApiKey::random().unwrap());
        assert_eq!(format!("{:?}", ApiKey::random().unwrap()), "ApiKey(hidden)");
    }
}
