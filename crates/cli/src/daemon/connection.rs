//! The client of the daemon, for commands that may only print their requests (`--dry-run`).

use crate::error::Error;
pub use client::Begun;
use client::Method;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::Write;
use std::ops::Deref;
use std::path::Path;

/// A daemon's API. Reads are those of [`client::Client`].
pub struct Client {
    api: client::Client,
    /// Nothing is to be changed.
    is_dry: bool,
}

impl Deref for Client {
    type Target = client::Client;

    fn deref(&self) -> &client::Client {
        &self.api
    }
}

impl Client {
    /// That of the daemon at `socket`.
    ///
    /// # Errors
    /// When the system refuses what HTTP takes.
    pub fn new(socket: &Path, is_dry: bool) -> Result<Client, Error> {
        // Long work is asked for, too: an array is made in as long as its members take.
        Ok(Client { api: client::Client::at_socket(socket, None)?, is_dry })
    }

    /// Whether nothing is to be changed.
    pub fn is_dry(&self) -> bool {
        self.is_dry
    }

    /// Has something changed; nothing if it was only to be said what.
    ///
    /// # Errors
    /// When the daemon does not answer, or refuses.
    pub fn change<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &[&str],
        body: &impl Serialize,
    ) -> Result<Option<T>, Error> {
        if self.is_dry {
            let body = serde_json::to_value(body).expect("plain data");
            let path = self.api.url(path);
            let _ = writeln!(std::io::stdout().lock(), "{method} {} {body}", path.path());
            return Ok(None);
        }
        Ok(Some(self.api.change(method, path, body)?))
    }

    /// Has something deleted.
    ///
    /// # Errors
    /// As [`Client::change`].
    pub fn delete(&self, path: &[&str], query: &[(&str, &str)]) -> Result<(), Error> {
        if self.is_dry {
            let mut url = self.api.url(path);
            if !query.is_empty() {
                url.query_pairs_mut().extend_pairs(query);
            }
            let query = url.query().map(|query| format!("?{query}")).unwrap_or_default();
            let _ = writeln!(std::io::stdout().lock(), "DELETE {}{query}", url.path());
            return Ok(());
        }
        Ok(self.api.delete(path, query)?)
    }
}
