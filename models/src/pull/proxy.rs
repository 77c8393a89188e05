//! Proxies as the environment states them.

use std::fmt;
use ureq::http::Uri;

/// Proxy addresses by kind of request.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Proxies {
    /// For `http` addresses.
    pub http: Option<String>,
    /// For `https` addresses.
    pub https: Option<String>,
    /// For both, where the above are not set.
    pub all: Option<String>,
    /// Hosts that are asked directly: names (their subdomains too), addresses, each optionally with a port, or `*`; separated
    /// by commas.
    pub direct: String,
}

impl Proxies {
    /// Reads `http_proxy`, `https_proxy`, `all_proxy` and `no_proxy`; a lower-case name goes before its upper-case form.
    #[must_use]
    pub fn from_env() -> Self {
        let read = |name: &str| {
            let names = [name.to_owned(), name.to_ascii_uppercase()];
            names.iter().find_map(|name| std::env::var(name).ok().filter(|value| !value.trim().is_empty()))
        };
        Self {
            http: read("http_proxy"),
            https: read("https_proxy"),
            all: read("all_proxy"),
            direct: read("no_proxy").unwrap_or_default(),
        }
    }

    /// The proxy for `uri`.
    pub(super) fn for_uri(&self, uri: &Uri) -> Option<&str> {
        let host = uri.host()?.trim_matches(['[', ']']).to_ascii_lowercase();
        let is_https = uri.scheme_str() == Some("https");
        let port = uri.port_u16().unwrap_or(if is_https { 443 } else { 80 });
        if self.direct.split([',', ' ']).any(|pattern| is_direct(pattern, &host, port)) {
            return None;
        }
        let proxy = if is_https { &self.https } else { &self.http };
        proxy.as_deref().or(self.all.as_deref()).map(str::trim)
    }
}

impl fmt::Debug for Proxies {
    /// Addresses may hold passwords; they are not printed.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let set = |proxy: &Option<String>| if proxy.is_some() { "set" } else { "unset" };
        f.debug_struct("Proxies")
            .field("http", &set(&self.http))
            .field("https", &set(&self.https))
            .field("all", &set(&self.all))
            .field("direct", &self.direct)
            .finish()
    }
}

fn is_direct(pattern: &str, host: &str, port: u16) -> bool {
    let pattern = pattern.trim().to_ascii_lowercase();
    if pattern == "*" {
        return true;
    }
    // An IPv6 address has colons of its own and a port only behind brackets.
    let (name, wanted_port) = match pattern.rsplit_once(':') {
        Some((name, digits)) if !name.contains(':') || name.ends_with(']') => match digits.parse::<u16>() {
            Ok(wanted) => (name, Some(wanted)),
            Err(_) => return false,
        },
        _ => (pattern.as_str(), None),
    };
    let name = name.trim_matches(['[', ']']).trim_start_matches("*.").trim_start_matches('.');
    let matches = host == name || host.strip_suffix(name).is_some_and(|sub| sub.ends_with('.'));
    !name.is_empty() && matches && wanted_port.is_none_or(|wanted| wanted == port)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_proxy_depends_on_scheme_and_host() {
        let proxies = Proxies {
            http: Some("http://plain:1".to_owned()),
            https: None,
            all: Some("http://all:2".to_owned()),
            direct: "localhost, .example.org,example.net:8080,[::1]".to_owned(),
        };
        let proxy = |uri: &str| proxies.for_uri(&uri.parse().unwrap());
        assert_eq!(proxy("http://hub.test/x"), Some("http://plain:1"));
        assert_eq!(proxy("https://hub.test/x"), Some("http://all:2"));
        assert_eq!(proxy("https://LOCALHOST:8080/x"), None);
        assert_eq!(proxy("https://example.org/"), None);
        assert_eq!(proxy("https://a.example.org/"), None);
        assert_eq!(proxy("https://badexample.org/"), Some("http://all:2"));
        assert_eq!(proxy("https://example.net/"), Some("http://all:2"));
        assert_eq!(proxy("https://example.net:8080/"), None);
        assert_eq!(proxy("http://[::1]:8080/"), None);
        assert!(Proxies { direct: "*".to_owned(), ..proxies.clone() }.for_uri(&"http://x/".parse().unwrap()).is_none());
        assert_eq!(Proxies::default().for_uri(&"http://x/".parse().unwrap()), None);
        assert!(!format!("{proxies:?}").contains("plain"));
    }
}
