//! TLS from files.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use thiserror::Error;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, pem};

/// Certificate or key cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file that is no PEM file of the wanted kind.
    #[error("{}: wanted {wanted} in PEM form: {source}", path.display())]
    Pem {
        /// The file.
        path: PathBuf,
        /// What it should hold.
        wanted: &'static str,
        /// What is wrong.
        source: pem::Error,
    },
    /// A file without any certificate.
    #[error("{}: wanted certificates in PEM form, found none", path.display())]
    NoCertificate {
        /// The file.
        path: PathBuf,
    },
    /// They do not fit each other, or use what is not supported.
    #[error("{} and {}: {source}; wanted a certificate chain and its key", certificates.display(), key.display())]
    Pair {
        /// File of the certificates.
        certificates: PathBuf,
        /// File of the key.
        key: PathBuf,
        /// What is wrong.
        source: tokio_rustls::rustls::Error,
    },
}

/// What accepts TLS connections with the certificates and key in these files.
pub(crate) fn acceptor(certificates: &Path, key: &Path) -> Result<TlsAcceptor, TlsError> {
    let pem = |path: &Path, wanted| {
        let path = path.to_owned();
        move |source| TlsError::Pem { path, wanted, source }
    };
    let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_file_iter(certificates)
        .and_then(Iterator::collect)
        .map_err(pem(certificates, "certificates"))?;
    if chain.is_empty() {
        return Err(TlsError::NoCertificate { path: certificates.to_owned() });
    }
    let private = PrivateKeyDer::from_pem_file(key).map_err(pem(key, "a private key"))?;
    let pair = |source| TlsError::Pair { certificates: certificates.to_owned(), key: key.to_owned(), source };
    let mut config = ServerConfig::builder().with_no_client_auth().with_single_cert(chain, private).map_err(pair)?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// A failed handshake is the client's; it is not worth more than a line for those who look.
pub(crate) fn note_failed_handshake(error: &io::Error) {
    tracing::debug!(%error, "a TLS handshake failed");
}
